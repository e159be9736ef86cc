//! Principal components of a table: the directions in which its rows differ most.
//!
//! The rows of a table (n, d), less their mean, have the covariance `c = x^T @ x / n`; the first k
//! eigenvectors of c, by falling eigenvalue, span the k dimensions that keep most of the rows: what
//! is lost is the sum of the other eigenvalues. The mean is taken off first: rows of an embedding
//! share a large one, which would take the first direction and say nothing of their differences.
//!
//! The eigenvectors are found in f64 by one-sided Jacobi rotations (Hestenes): pairs of rows of c
//! are rotated until all are orthogonal; then a row is an eigenvector times its eigenvalue. Rows
//! are paired as in a round-robin tournament, so that all pairs of a round are independent: the
//! bits are the same on any number of threads. About 6 d^3 operations a sweep, six to ten sweeps.

use crate::error::{Error, Result};
use crate::tensor::Tensor;
use crate::tensor::cpu::{Mat, MatMut, Scope};
use crate::tensor::rng::Rng;
use rayon::prelude::*;

/// Rows that are decoded and multiplied at a time.
const N_ROWS: usize = 2048;
/// Deviation of rows past d, times the root of d: a hundredth of a direction's length.
const SMALL: f64 = 0.01;
/// Sweeps over all pairs of rows; ten are usual.
const N_SWEEP_MAX: usize = 60;
/// Cosine between two rows that are orthogonal: well above rounding, well below that of f32.
const ORTHOGONAL: f64 = 1e-12;
/// Added to the diagonal, relative to the mean variance: no row vanishes.
const SHIFT: f64 = 1e-10;

/// The first `k` directions of the rows of `table`, in any dtype: (k, d), orthonormal rows, the
/// most important first. Rows past d are small random numbers of `seed`.
pub fn principal_components(table: &Tensor, k: usize, seed: u64) -> Result<Tensor> {
    let (_, d) = table.dims2();
    let axes = axes(table)?;
    let mut directions = Tensor::uninit(table.device(), &[k, d]);
    let rng = Rng::new(seed, 0);
    for (row, out) in directions.f32_mut().chunks_exact_mut(d.max(1)).enumerate() {
        match axes.get(row) {
            Some(vector) => put_unit(vector, out),
            None => {
                for (col, out) in out.iter_mut().enumerate() {
                    let normal = rng.normal((row * d + col) as u64);
                    *out = (normal * SMALL / (d as f64).sqrt()) as f32;
                }
            }
        }
    }
    Ok(directions)
}

/// All d directions, each as long as the variance along it, the longest first.
fn axes(table: &Tensor) -> Result<Vec<Vec<f64>>> {
    let (_, d) = table.dims2();
    let mut c = covariance(table, &mean(table));
    if c.iter().any(|x| !x.is_finite()) {
        let problem = "a table with numbers that are not finite has no principal components";
        return Err(Error::input(problem, "the weights may be damaged"));
    }
    let trace: f64 = c.iter().step_by(d + 1).sum();
    let shift = if trace > 0.0 { SHIFT * trace / d as f64 } else { 1.0 };
    c.iter_mut().step_by(d + 1).for_each(|x| *x += shift);
    let mut rows: Vec<Vec<f64>> = c.chunks_exact(d.max(1)).map(<[f64]>::to_vec).collect();
    table.device().expect_cpu().run(|| orthogonalise(&mut rows))?;
    rows.sort_by(|a, b| dot(b, b).total_cmp(&dot(a, a)));
    Ok(rows)
}

/// The unit vector; of it and its opposite, the one whose largest number is positive.
fn put_unit(vector: &[f64], out: &mut [f32]) {
    let largest =
        vector.iter().fold(0.0f64, |best, x| if x.abs() > best.abs() { *x } else { best });
    let factor = largest.signum() / dot(vector, vector).sqrt();
    out.iter_mut().zip(vector).for_each(|(out, x)| *out = (factor * x) as f32);
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

/// In eight sums, which the compiler turns into vectors.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    for (a, b) in a.chunks(8).zip(b.chunks(8)) {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += a * b);
    }
    sums.iter().sum()
}

/// Rotates pairs of rows until every pair is orthogonal.
fn orthogonalise(rows: &mut Vec<Vec<f64>>) -> Result<()> {
    let n = rows.len();
    // An empty row makes the number even: whoever meets it rests.
    rows.resize(n.next_multiple_of(2), Vec::new());
    let half = rows.len() / 2;
    for _ in 0..N_SWEEP_MAX {
        let mut n_rotated = 0;
        for _ in 1..rows.len() {
            let (left, right) = rows.split_at_mut(half);
            let pairs = left.par_iter_mut().zip(right.par_iter_mut().rev());
            n_rotated += pairs.filter_map(|(a, b)| rotate(a, b)).count();
            // The first stays; the others move on by one.
            rows[1..].rotate_right(1);
        }
        if n_rotated == 0 {
            rows.retain(|row| !row.is_empty());
            return Ok(());
        }
    }
    let problem = format!("{n} principal components were not found in {N_SWEEP_MAX} sweeps");
    Err(Error::input(problem, "the weights may be damaged"))
}

/// Makes two rows orthogonal; nothing if they are.
fn rotate(a: &mut [f64], b: &mut [f64]) -> Option<()> {
    let (aa, bb, ab) = (dot(a, a), dot(b, b), dot(a, b));
    if ab.abs() <= ORTHOGONAL * (aa * bb).sqrt() {
        return None;
    }
    let zeta = (bb - aa) / (2.0 * ab);
    let tan = zeta.signum() / (zeta.abs() + zeta.hypot(1.0));
    let cos = 1.0 / tan.hypot(1.0);
    let sin = cos * tan;
    for (a, b) in a.iter_mut().zip(b) {
        (*a, *b) = (cos * *a - sin * *b, sin * *a + cos * *b);
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::device::Device;

    /// `y -= factor x`.
    fn subtract(y: &mut [f64], factor: f64, x: &[f64]) {
        y.iter_mut().zip(x).for_each(|(y, x)| *y -= factor * x);
    }

    fn variances(table: &Tensor) -> Vec<f64> {
        axes(table).unwrap().iter().map(|axis| dot(axis, axis).sqrt()).collect()
    }

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
        assert!(mean(&table).iter().all(|mean| (mean - 3.0).abs() < 0.1));
        for row in found.f32().chunks(d) {
            let row: Vec<f64> = row.iter().map(|x| *x as f64).collect();
            let inside: f64 = basis[..k].iter().map(|b| dot(&row, b).powi(2)).sum();
            assert!((inside - 1.0).abs() < 1e-4, "{inside}");
        }
        for (i, variance) in variances(&table)[..k].iter().enumerate() {
            let want = (2.0 - 0.2 * i as f64).powi(2);
            assert!((variance / want - 1.0).abs() < 0.1, "{variance} {want}");
        }
    }

    #[test]
    fn what_is_lost_is_the_sum_of_the_variances_left_out() {
        let device = Device::cpu(2).unwrap();
        let (n, d, k) = (3000, 33, 9);
        let (rows, _) = planted(n, d, |i| 1.0 / (1.0 + i as f64));
        let table = Tensor::from_f32(&device, &[n, d], &rows);
        let found = principal_components(&table, k, 0).unwrap();
        let (w, mean, variances) = (found.f32(), mean(&table), variances(&table));
        for i in 0..k {
            for j in 0..k {
                let along: f32 = (0..d).map(|col| w[i * d + col] * w[j * d + col]).sum();
                let want = if i == j { 1.0 } else { 0.0 };
                assert!((along - want).abs() < 1e-5, "{i} {j}: {along}");
            }
        }
        let mut lost = 0.0;
        for row in rows.chunks(d) {
            let x: Vec<f64> = (0..d).map(|j| (row[j] - mean[j]) as f64).collect();
            lost += dot(&x, &x);
            for direction in w.chunks(d) {
                let along: f64 = (0..d).map(|j| x[j] * direction[j] as f64).sum();
                lost -= along * along;
            }
        }
        let want: f64 = variances[k..].iter().sum();
        assert!((lost / n as f64 / want - 1.0).abs() < 1e-3, "{} {want}", lost / n as f64);
        assert!(variances.is_sorted_by(|a, b| a >= b));
    }

    #[test]
    fn degenerate_tables_and_more_directions_than_columns_are_fine() {
        let device = Device::cpu(1).unwrap();
        // All rows the same, then two columns that are one: zeros among the variances.
        for rows in [[1.0f32; 12], [1.0, 1.0, 0.0, 2.0, 2.0, 0.0, 3.0, 3.0, 0.0, 4.0, 4.0, 0.0]] {
            let table = Tensor::from_f32(&device, &[4, 3], &rows);
            let found = principal_components(&table, 5, 1).unwrap();
            let w = found.f32();
            for row in w[..9].chunks(3) {
                assert!((row.iter().map(|x| x * x).sum::<f32>() - 1.0).abs() < 1e-5, "{row:?}");
            }
            assert!(w[9..].iter().all(|x| *x != 0.0 && x.abs() < 0.05), "{:?}", &w[9..]);
            assert_eq!(variances(&table).len(), 3);
        }
    }

    #[test]
    fn the_bits_are_the_same_on_any_number_of_threads_and_other_numbers_than_finite_are_refused() {
        let (mut rows, _) = planted(2500, 40, |i| 1.0 / (1.0 + i as f64));
        let run = |n_threads: usize, rows: &[f32]| {
            let device = Device::cpu(n_threads).unwrap();
            let table = Tensor::from_f32(&device, &[2500, 40], rows);
            principal_components(&table, 50, 2).map(|found| found.f32().to_vec())
        };
        let want = run(1, &rows).unwrap();
        assert!(want == run(2, &rows).unwrap() && want == run(3, &rows).unwrap());
        rows[17] = f32::NAN;
        let error = run(1, &rows).unwrap_err().report();
        assert!(error.contains("not finite"), "{error}");
    }
}
