//! Principal components of a table: the directions in which its rows differ most.
//!
//! The rows of a table (n, d), less their mean, have the covariance `c = x^T @ x / n`; the first k
//! eigenvectors of c, by falling eigenvalue, span the k dimensions that keep most of the rows: what
//! is lost is the sum of the other eigenvalues. The mean is taken off first: rows of an embedding
//! share a large one, which would take the first direction and say nothing of their differences.
//!
//! The eigenvectors are found in f64 by Householder's reduction to a tridiagonal matrix and the QL
//! iteration with implicit shifts (the `tred2` and `tql2` of EISPACK): all of them, to rounding,
//! in a fixed order, on one thread. About 7 d^3 operations.

use crate::error::{Error, Result};
use crate::tensor::Tensor;
use crate::tensor::cpu::{Mat, MatMut, Scope};
use crate::tensor::rng::Rng;

/// Directions of a table.
pub struct Components {
    /// (k, d): orthonormal rows, the most important first. Rows past d are small random numbers.
    pub directions: Tensor,
    /// Variance along each of the d directions, falling.
    pub variances: Vec<f64>,
    /// Mean of the rows: d numbers.
    pub mean: Vec<f32>,
}

/// Rows that are decoded and multiplied at a time.
const N_ROWS: usize = 2048;
/// Deviation of rows past d, times the root of d: a hundredth of a direction's length.
const SMALL: f64 = 0.01;
/// Iterations for one eigenvalue; two or three are usual.
const N_ITER_MAX: usize = 60;

/// The first `k` directions of the rows of `table`, in any dtype; `seed` is for rows past d.
pub fn principal_components(table: &Tensor, k: usize, seed: u64) -> Result<Components> {
    let (_, d) = table.dims2();
    let mean = mean(table);
    let mut vectors = covariance(table, &mean);
    if vectors.iter().any(|x| !x.is_finite()) {
        let problem = "a table with numbers that are not finite has no principal components";
        return Err(Error::input(problem, "the weights may be damaged"));
    }
    let (mut values, mut off) = tridiagonal(&mut vectors, d);
    diagonal(&mut values, &mut off, &mut vectors)?;
    let mut order: Vec<usize> = (0..d).collect();
    order.sort_by(|&i, &j| values[j].total_cmp(&values[i]));
    let mut directions = Tensor::uninit(table.device(), &[k, d]);
    let rng = Rng::new(seed, 0);
    for (row, out) in directions.f32_mut().chunks_exact_mut(d.max(1)).enumerate() {
        match order.get(row) {
            Some(&idx) => put_signed(&vectors[idx * d..(idx + 1) * d], out),
            None => {
                for (col, out) in out.iter_mut().enumerate() {
                    let normal = rng.normal((row * d + col) as u64);
                    *out = (normal * SMALL / (d as f64).sqrt()) as f32;
                }
            }
        }
    }
    // Rounding may leave a zero a little below.
    let variances = order.iter().map(|&idx| values[idx].max(0.0)).collect();
    Ok(Components { directions, variances, mean })
}

/// A direction and its opposite are the same: the largest number becomes positive.
fn put_signed(vector: &[f64], out: &mut [f32]) {
    let largest =
        vector.iter().fold(0.0f64, |best, x| if x.abs() > best.abs() { *x } else { best });
    let sign = largest.signum();
    out.iter_mut().zip(vector).for_each(|(out, x)| *out = (sign * x) as f32);
}

/// Runs of rows in f32.
fn each_run(table: &Tensor, mut f: impl FnMut(&mut [f32])) {
    let (n, d) = table.dims2();
    let mut rows = vec![0.0; N_ROWS.min(n) * d];
    for first in (0..n).step_by(N_ROWS) {
        let rows = &mut rows[..N_ROWS.min(n - first) * d];
        table.read_f32(first * d, rows);
        f(rows);
    }
}

fn mean(table: &Tensor) -> Vec<f32> {
    let (n, d) = table.dims2();
    let mut sums = vec![0.0f64; d];
    each_run(table, |rows| {
        for row in rows.chunks_exact(d.max(1)) {
            sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += *x as f64);
        }
    });
    sums.iter().map(|sum| (sum / n.max(1) as f64) as f32).collect()
}

/// (d, d), summed in f64 over runs of rows.
fn covariance(table: &Tensor, mean: &[f32]) -> Vec<f64> {
    let cpu = table.device().expect_cpu();
    let (n, d) = table.dims2();
    let (mut sum, mut product) = (vec![0.0f64; d * d], vec![0.0f32; d * d]);
    each_run(table, |rows| {
        for row in rows.chunks_exact_mut(d.max(1)) {
            row.iter_mut().zip(mean).for_each(|(x, mean)| *x -= mean);
        }
        let x = Mat::new(rows, rows.len() / d.max(1), d);
        cpu.gemm(MatMut::new(&mut product, d, d), 0.0, 1.0, x.t(), x, Scope::Machine);
        sum.iter_mut().zip(&product).for_each(|(sum, x)| *sum += *x as f64 / n as f64);
    });
    sum
}

/// Two rows of a matrix with rows of `n`, the lower first.
fn two_rows(v: &mut [f64], n: usize, low: usize, high: usize) -> (&mut [f64], &mut [f64]) {
    let (left, right) = v.split_at_mut(high * n);
    (&mut left[low * n..(low + 1) * n], &mut right[..n])
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `y -= factor x`.
fn subtract(y: &mut [f64], factor: f64, x: &[f64]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y -= factor * x);
}

/// Reduces the symmetric matrix `v` to a tridiagonal one; returns its diagonal and, from index 1
/// on, what is beside it. The rows of `v` become the basis in which it is so.
fn tridiagonal(v: &mut [f64], n: usize) -> (Vec<f64>, Vec<f64>) {
    let (mut d, mut e) = (vec![0.0; n], vec![0.0; n]);
    if n == 0 {
        return (d, e);
    }
    // Row j of v is column j of the matrix that EISPACK works on: inner loops run along rows.
    (0..n).for_each(|j| d[j] = v[j * n + n - 1]);
    for i in (1..n).rev() {
        d[i] = reflect(v, n, i, &mut d, &mut e);
    }
    for i in 0..n - 1 {
        v[i * n + n - 1] = v[i * n + i];
        v[i * n + i] = 1.0;
        let h = d[i + 1];
        if h != 0.0 {
            let next = v[(i + 1) * n..(i + 1) * n + i + 1].to_vec();
            for j in 0..=i {
                let row = &mut v[j * n..j * n + i + 1];
                let g = dot(&next, row);
                subtract(row, g / h, &next);
            }
        }
        v[(i + 1) * n..(i + 1) * n + i + 1].fill(0.0);
    }
    for j in 0..n {
        d[j] = std::mem::take(&mut v[j * n + n - 1]);
    }
    v[n * n - 1] = 1.0;
    e[0] = 0.0;
    (d, e)
}

/// One Householder reflection, of the first `i` numbers in `d`; returns half its squared length.
fn reflect(v: &mut [f64], n: usize, i: usize, d: &mut [f64], e: &mut [f64]) -> f64 {
    let scale: f64 = d[..i].iter().map(|x| x.abs()).sum();
    if scale == 0.0 {
        e[i] = d[i - 1];
        for j in 0..i {
            d[j] = v[j * n + i - 1];
            v[j * n + i] = 0.0;
            v[i * n + j] = 0.0;
        }
        return 0.0;
    }
    d[..i].iter_mut().for_each(|x| *x /= scale);
    let mut h = dot(&d[..i], &d[..i]);
    let f = d[i - 1];
    let g = if f > 0.0 { -h.sqrt() } else { h.sqrt() };
    e[i] = scale * g;
    h -= f * g;
    d[i - 1] = f - g;
    e[..i].fill(0.0);
    for j in 0..i {
        let f = d[j];
        v[i * n + j] = f;
        let row = &v[j * n..j * n + i];
        e[j] += row[j] * f + dot(&row[j + 1..], &d[j + 1..i]);
        subtract(&mut e[j + 1..i], -f, &row[j + 1..]);
    }
    e[..i].iter_mut().for_each(|x| *x /= h);
    let half = dot(&e[..i], &d[..i]) / (h + h);
    subtract(&mut e[..i], half, &d[..i]);
    for j in 0..i {
        let (f, g) = (d[j], e[j]);
        let row = &mut v[j * n..j * n + i];
        subtract(&mut row[j..], f, &e[j..i]);
        subtract(&mut row[j..], g, &d[j..i]);
        d[j] = row[i - 1];
        v[j * n + i] = 0.0;
    }
    h
}

/// Turns a tridiagonal matrix into a diagonal one: `d` becomes the eigenvalues, the rows of `v`
/// the eigenvectors.
fn diagonal(d: &mut [f64], e: &mut [f64], v: &mut [f64]) -> Result<()> {
    let n = d.len();
    if n == 0 {
        return Ok(());
    }
    e.rotate_left(1);
    e[n - 1] = 0.0;
    let (mut shift, mut size) = (0.0, 0.0f64);
    for l in 0..n {
        size = size.max(d[l].abs() + e[l].abs());
        let is_small = |x: f64| x.abs() <= f64::EPSILON * size;
        let m = (l..n).find(|&m| is_small(e[m])).unwrap_or(n - 1);
        let mut n_iter = 0;
        while m > l && !is_small(e[l]) {
            n_iter += 1;
            if n_iter > N_ITER_MAX {
                let problem = format!("eigenvalue {l} of {n} was not found in {N_ITER_MAX} steps");
                return Err(Error::input(problem, "the weights may be damaged"));
            }
            shift += sweep(d, e, v, l, m);
        }
        d[l] += shift;
        e[l] = 0.0;
    }
    Ok(())
}

/// One step of the QL iteration on rows `l..=m`; returns what it took off the diagonal.
fn sweep(d: &mut [f64], e: &mut [f64], v: &mut [f64], l: usize, m: usize) -> f64 {
    let n = d.len();
    let g = d[l];
    let p = (d[l + 1] - g) / (2.0 * e[l]);
    let r = if p < 0.0 { -p.hypot(1.0) } else { p.hypot(1.0) };
    d[l] = e[l] / (p + r);
    d[l + 1] = e[l] * (p + r);
    let after = d[l + 1];
    let shift = g - d[l];
    d[l + 2..].iter_mut().for_each(|x| *x -= shift);
    let mut p = d[m];
    let [mut c, mut c2, mut c3] = [1.0; 3];
    let (mut s, mut s2) = (0.0, 0.0);
    let beside = e[l + 1];
    for i in (l..m).rev() {
        (c3, c2, s2) = (c2, c, s);
        let (g, h) = (c * e[i], c * p);
        let r = p.hypot(e[i]);
        e[i + 1] = s * r;
        (s, c) = (e[i] / r, p / r);
        p = c * d[i] - s * g;
        d[i + 1] = h + s * (c * g + s * d[i]);
        let (low, high) = two_rows(v, n, i, i + 1);
        for (low, high) in low.iter_mut().zip(high) {
            (*high, *low) = (s * *low + c * *high, c * *low - s * *high);
        }
    }
    p = -s * s2 * c3 * beside * e[l] / after;
    e[l] = s * p;
    d[l] = c * p;
    shift
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::device::Device;

    /// n rows around a mean, in the span of the first of d random orthogonal directions; the
    /// deviation along direction i is `size(i)`.
    fn planted(n: usize, d: usize, size: impl Fn(usize) -> f64) -> (Vec<f32>, Vec<Vec<f64>>) {
        let rng = Rng::new(4, 0);
        let mut basis: Vec<Vec<f64>> = Vec::new();
        for i in 0..d {
            let mut x: Vec<f64> = (0..d).map(|j| rng.normal((i * d + j) as u64)).collect();
            for other in &basis {
                let along = dot(&x, other);
                subtract(&mut x, along, other);
            }
            let length = dot(&x, &x).sqrt();
            basis.push(x.iter().map(|x| x / length).collect());
        }
        let noise = Rng::new(5, 0);
        let mut rows = Vec::new();
        for row in 0..n {
            let mut x = vec![3.0; d];
            for (i, direction) in basis.iter().enumerate() {
                subtract(&mut x, -size(i) * noise.normal((row * d + i) as u64), direction);
            }
            rows.extend(x.iter().map(|x| *x as f32));
        }
        (rows, basis)
    }

    #[test]
    fn a_planted_subspace_is_found() {
        let device = Device::cpu(2).unwrap();
        let (n, d, k) = (5000, 24, 5);
        let (rows, basis) = planted(n, d, |i| if i < k { 2.0 - 0.2 * i as f64 } else { 0.01 });
        let table = Tensor::from_f32(&device, &[n, d], &rows);
        let found = principal_components(&table, k, 0).unwrap();
        assert!(found.mean.iter().all(|mean| (mean - 3.0).abs() < 0.1));
        for row in found.directions.f32().chunks(d) {
            let row: Vec<f64> = row.iter().map(|x| *x as f64).collect();
            let inside: f64 = basis[..k].iter().map(|b| dot(&row, b).powi(2)).sum();
            assert!((inside - 1.0).abs() < 1e-4, "{inside}");
        }
        for (i, variance) in found.variances[..k].iter().enumerate() {
            let want = (2.0 - 0.2 * i as f64).powi(2);
            assert!((variance / want - 1.0).abs() < 0.1, "{variance} {want}");
        }
    }

    #[test]
    fn what_is_lost_is_the_sum_of_the_variances_left_out() {
        let device = Device::cpu(2).unwrap();
        let (n, d, k) = (3000, 33, 9);
        let (rows, _) = planted(n, d, |i| 1.0 / (1.0 + i as f64));
        let found = principal_components(&Tensor::from_f32(&device, &[n, d], &rows), k, 0).unwrap();
        let w = found.directions.f32();
        for i in 0..k {
            for j in 0..k {
                let along: f32 = (0..d).map(|col| w[i * d + col] * w[j * d + col]).sum();
                let want = if i == j { 1.0 } else { 0.0 };
                assert!((along - want).abs() < 1e-5, "{i} {j}: {along}");
            }
        }
        let mut lost = 0.0;
        for row in rows.chunks(d) {
            let x: Vec<f64> = (0..d).map(|j| (row[j] - found.mean[j]) as f64).collect();
            lost += dot(&x, &x);
            for direction in w.chunks(d) {
                let along: f64 = (0..d).map(|j| x[j] * direction[j] as f64).sum();
                lost -= along * along;
            }
        }
        let want: f64 = found.variances[k..].iter().sum();
        assert!((lost / n as f64 / want - 1.0).abs() < 1e-3, "{} {want}", lost / n as f64);
        assert!(found.variances.is_sorted_by(|a, b| a >= b));
    }

    #[test]
    fn degenerate_tables_and_more_directions_than_columns_are_fine() {
        let device = Device::cpu(1).unwrap();
        // All rows the same, then two columns that are one: zeros among the variances.
        for rows in [[1.0f32; 12], [1.0, 1.0, 0.0, 2.0, 2.0, 0.0, 3.0, 3.0, 0.0, 4.0, 4.0, 0.0]] {
            let table = Tensor::from_f32(&device, &[4, 3], &rows);
            let found = principal_components(&table, 5, 1).unwrap();
            let w = found.directions.f32();
            for row in w[..9].chunks(3) {
                assert!((row.iter().map(|x| x * x).sum::<f32>() - 1.0).abs() < 1e-5, "{row:?}");
            }
            assert!(w[9..].iter().all(|x| *x != 0.0 && x.abs() < 0.05), "{:?}", &w[9..]);
            assert_eq!(found.variances.len(), 3);
        }
    }

    #[test]
    fn the_bits_are_the_same_on_any_number_of_threads_and_other_numbers_than_finite_are_refused() {
        let (mut rows, _) = planted(2500, 40, |i| 1.0 / (1.0 + i as f64));
        let run = |n_threads: usize, rows: &[f32]| {
            let device = Device::cpu(n_threads).unwrap();
            let table = Tensor::from_f32(&device, &[2500, 40], rows);
            principal_components(&table, 50, 2).map(|found| found.directions.f32().to_vec())
        };
        let want = run(1, &rows).unwrap();
        assert!(want == run(2, &rows).unwrap() && want == run(3, &rows).unwrap());
        rows[17] = f32::NAN;
        let error = run(1, &rows).unwrap_err().to_string();
        assert!(error.contains("not finite"), "{error}");
    }
}
