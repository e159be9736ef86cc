//! Matrix products: `c = alpha * a @ b + beta * c`, on views with any strides.
//!
//! The work is done by the crate `gemm-f32`. It cuts m and n among threads but never k, so the bits
//! of a result do not depend on how many there are.

use super::Cpu;
use gemm_common::Parallelism;

/// A matrix to read: element (i, j) is at `i * row + j * col`.
#[derive(Clone, Copy)]
pub struct Mat<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row: usize,
    col: usize,
}

/// A matrix to write.
pub struct MatMut<'a> {
    data: &'a mut [f32],
    rows: usize,
    cols: usize,
    row: usize,
}

/// Whether a product may use the other threads; inside a parallel loop it must not.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// All threads of the pool.
    Machine,
    /// The calling thread alone.
    Thread,
}

/// The last index a strided matrix touches must lie inside its slice.
fn expect_inside(what: &str, len: usize, rows: usize, cols: usize, row: usize) {
    let is_inside = rows == 0 || cols == 0 || (rows - 1) * row + cols <= len;
    assert!(is_inside, "{what}: {rows} x {cols} with rows {row} apart in {len} numbers");
}

impl<'a> Mat<'a> {
    pub fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        Mat::strided(data, rows, cols, cols)
    }

    /// Row-major, with rows `row` numbers apart.
    pub fn strided(data: &'a [f32], rows: usize, cols: usize, row: usize) -> Self {
        expect_inside("matrix", data.len(), rows, cols, row);
        Mat { data, rows, cols, row, col: 1 }
    }

    /// The transpose, without moving anything.
    pub fn t(self) -> Self {
        Mat { rows: self.cols, cols: self.rows, row: self.col, col: self.row, ..self }
    }
}

impl<'a> MatMut<'a> {
    pub fn new(data: &'a mut [f32], rows: usize, cols: usize) -> Self {
        MatMut::strided(data, rows, cols, cols)
    }

    /// Row-major, with rows `row` numbers apart.
    pub fn strided(data: &'a mut [f32], rows: usize, cols: usize, row: usize) -> Self {
        expect_inside("result", data.len(), rows, cols, row);
        assert!(rows <= 1 || row >= cols, "result: rows of {cols} overlap at stride {row}");
        MatMut { data, rows, cols, row }
    }
}

impl Cpu {
    /// `c = alpha * a @ b + beta * c`; with `beta` zero the old `c` is not read.
    pub fn gemm(&self, c: MatMut, beta: f32, alpha: f32, a: Mat, b: Mat, scope: Scope) {
        let (m, n, k) = (c.rows, c.cols, a.cols);
        assert_eq!(((a.rows, b.rows), b.cols), ((m, k), n), "product: sides and result");
        if m == 0 || n == 0 {
            return;
        }
        // The kernels are faster where columns of the result lie together: a result in rows is
        // computed as its transpose.
        let (m, n, a, b, row, col) = match c.row {
            0 | 1 => (m, n, a, b, c.row, 1),
            _ => (n, m, b.t(), a.t(), 1, c.row),
        };
        let n_threads = self.n_threads();
        let mut product = |parallelism| {
            // SAFETY: `Mat` and `MatMut` checked at construction that every index their strides
            // reach lies inside the slices they borrow, `c` is borrowed mutably so it overlaps
            // neither `a` nor `b`, and its rows do not overlap each other. All strides fit isize
            // because they index slices.
            unsafe {
                gemm_f32::gemm::f32::get_gemm_fn()(
                    m,
                    n,
                    k,
                    c.data.as_mut_ptr(),
                    col as isize,
                    row as isize,
                    beta != 0.0,
                    a.data.as_ptr(),
                    a.col as isize,
                    a.row as isize,
                    b.data.as_ptr(),
                    b.col as isize,
                    b.row as isize,
                    beta,
                    alpha,
                    false,
                    false,
                    false,
                    parallelism,
                );
            }
        };
        if scope == Scope::Thread || n_threads == 1 {
            product(Parallelism::None);
        } else {
            self.run(|| product(Parallelism::Rayon(n_threads)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(n: usize, seed: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 37 + seed * 11) % 101) as f32 / 50.0 - 1.0).collect()
    }

    #[test]
    fn products_are_right_for_every_layout_and_have_the_same_bits_on_any_number_of_threads() {
        for (m, n, k) in
            [(1, 1, 1), (1, 65, 33), (65, 1, 33), (7, 9, 300), (130, 70, 513), (257, 300, 129)]
        {
            let (a, b) = (numbers(m * k, 1), numbers(k * n, 2));
            let mut results: Vec<Vec<f32>> = Vec::new();
            for n_threads in [1, 2, 3] {
                let cpu = Cpu::new(n_threads).unwrap();
                let mut c = vec![0.5; m * n];
                let out = MatMut::new(&mut c, m, n);
                cpu.gemm(out, 2.0, 0.5, Mat::new(&a, m, k), Mat::new(&b, n, k).t(), Scope::Machine);
                results.push(c);
            }
            for (i, j) in [(0, 0), (m - 1, n - 1), (m / 2, n / 3)] {
                let dot = (0..k).map(|p| a[i * k + p] as f64 * b[j * k + p] as f64).sum::<f64>();
                assert!((results[0][i * n + j] as f64 - (1.0 + 0.5 * dot)).abs() < 1e-4);
            }
            assert!(results[0] == results[1] && results[0] == results[2], "{m} {n} {k}");
        }
    }
}
