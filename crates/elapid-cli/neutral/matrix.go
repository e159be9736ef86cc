// Package matrix has dense matrices of float64 and what is needed to solve linear systems.
package matrix

import (
	"errors"
	"fmt"
	"math"
	"strings"
)

// ErrSingular is returned when a system has no unique solution.
var ErrSingular = errors.New("matrix: singular to working precision")

// ShapeError says which sizes did not fit.
type ShapeError struct {
	Op         string
	Want, Have [2]int
}

func (e *ShapeError) Error() string {
	return fmt.Sprintf("matrix: %s: want %dx%d, have %dx%d",
		e.Op, e.Want[0], e.Want[1], e.Have[0], e.Have[1])
}

// Dense is a matrix in row-major order.
type Dense struct {
	rows, cols int
	data       []float64
}

// New makes a matrix of zeros.
func New(rows, cols int) *Dense {
	return &Dense{rows: rows, cols: cols, data: make([]float64, rows*cols)}
}

// FromRows copies rows of equal length.
func FromRows(rows [][]float64) (*Dense, error) {
	if len(rows) == 0 {
		return New(0, 0), nil
	}
	m := New(len(rows), len(rows[0]))
	for i, row := range rows {
		if len(row) != m.cols {
			return nil, &ShapeError{"FromRows", [2]int{1, m.cols}, [2]int{1, len(row)}}
		}
		copy(m.Row(i), row)
	}
	return m, nil
}

// Identity has ones on its diagonal.
func Identity(n int) *Dense {
	m := New(n, n)
	for i := 0; i < n; i++ {
		m.Set(i, i, 1)
	}
	return m
}

func (m *Dense) Dims() (rows, cols int)   { return m.rows, m.cols }
func (m *Dense) At(i, j int) float64      { return m.data[i*m.cols+j] }
func (m *Dense) Set(i, j int, v float64)  { m.data[i*m.cols+j] = v }
func (m *Dense) Row(i int) []float64      { return m.data[i*m.cols : (i+1)*m.cols] }

// Clone returns a copy that shares nothing.
func (m *Dense) Clone() *Dense {
	c := New(m.rows, m.cols)
	copy(c.data, m.data)
	return c
}

// Mul returns the product a*b.
func Mul(a, b *Dense) (*Dense, error) {
	if a.cols != b.rows {
		return nil, &ShapeError{"Mul", [2]int{a.cols, b.cols}, [2]int{b.rows, b.cols}}
	}
	out := New(a.rows, b.cols)
	for i := 0; i < a.rows; i++ {
		dst := out.Row(i)
		for k, v := range a.Row(i) {
			if v == 0 {
				continue
			}
			for j, w := range b.Row(k) {
				dst[j] += v * w
			}
		}
	}
	return out, nil
}

// Transpose swaps rows and columns.
func (m *Dense) Transpose() *Dense {
	t := New(m.cols, m.rows)
	for i := 0; i < m.rows; i++ {
		for j := 0; j < m.cols; j++ {
			t.Set(j, i, m.At(i, j))
		}
	}
	return t
}

// Solve finds x with a*x = b by elimination with partial pivoting.
func Solve(a *Dense, b []float64) ([]float64, error) {
	n := a.rows
	if a.cols != n || len(b) != n {
		return nil, &ShapeError{"Solve", [2]int{n, n}, [2]int{len(b), a.cols}}
	}
	work, x := a.Clone(), append([]float64(nil), b...)
	for col := 0; col < n; col++ {
		pivot := col
		for row := col + 1; row < n; row++ {
			if math.Abs(work.At(row, col)) > math.Abs(work.At(pivot, col)) {
				pivot = row
			}
		}
		if math.Abs(work.At(pivot, col)) < 1e-12 {
			return nil, ErrSingular
		}
		if pivot != col {
			top, low := work.Row(col), work.Row(pivot)
			for j := range top {
				top[j], low[j] = low[j], top[j]
			}
			x[col], x[pivot] = x[pivot], x[col]
		}
		for row := col + 1; row < n; row++ {
			factor := work.At(row, col) / work.At(col, col)
			for j := col; j < n; j++ {
				work.Set(row, j, work.At(row, j)-factor*work.At(col, j))
			}
			x[row] -= factor * x[col]
		}
	}
	for row := n - 1; row >= 0; row-- {
		for j := row + 1; j < n; j++ {
			x[row] -= work.At(row, j) * x[j]
		}
		x[row] /= work.At(row, row)
	}
	return x, nil
}

// String prints one row per line.
func (m *Dense) String() string {
	var sb strings.Builder
	for i := 0; i < m.rows; i++ {
		for j, v := range m.Row(i) {
			if j > 0 {
				sb.WriteByte(' ')
			}
			fmt.Fprintf(&sb, "%8.3f", v)
		}
		sb.WriteByte('\n')
	}
	return sb.String()
}
