//! Where a parameter lies in a file, and how its numbers are changed there.
//!
//! The engine has one form of every parameter: that of the Hugging Face families. Other files keep
//! the same numbers merged, cut, reordered or mapped; a `Place` says how, in both directions. With
//! it `formats/params.rs` reads and writes any container of tensors.
//!
//! | map        | in the file                                                                    |
//! |------------|--------------------------------------------------------------------------------|
//! | `Same`     | the same rows                                                                  |
//! | `PairRows` | of each head the rows (i, i + d_rotary / 2) side by side: RoPE on neighbours   |
//! | `NegExp`   | `-exp(x)`, from f64 rounded once                                               |
//! | `Scale`    | each row times a factor                                                        |
//!
//! `NegExp` and `Scale` lose bits, because two numbers may have one image. A writer may keep what
//! is lost beside the tensor (`corrections`): the steps from the number that comes back to the one
//! that was there. A reader believes them only where they lead to the image that is in the file.

use std::ops::Range;

#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    pub name: String,
    pub shape: Vec<usize>,
    /// Rows, all axes but the last taken together; `None`: all of it.
    pub rows: Option<Range<usize>>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Place {
    /// One after the other; nearly always one.
    pub parts: Vec<Part>,
    pub map: Map,
}

impl Place {
    pub fn whole(name: String, shape: &[usize], map: Map) -> Place {
        Place { parts: vec![Part { name, shape: shape.to_vec(), rows: None }], map }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Map {
    Same,
    /// Halves of each head become pairs.
    PairRows {
        d_head: usize,
        /// Rows that take part, from its first on.
        d_rotary: usize,
    },
    /// `-exp(x)`.
    NegExp,
    /// Rows, in order, and the factor of each run.
    Scale(Vec<(usize, f32)>),
}

impl Map {
    /// A factor for all rows; one is no change.
    pub fn scale(n_rows: usize, factor: f32) -> Map {
        if factor == 1.0 { Map::Same } else { Map::Scale(vec![(n_rows, factor)]) }
    }

    /// For a map that only moves rows: row `i` of the file is row `order[i]` of the parameter.
    /// `None` where it changes numbers.
    pub fn order(&self, n_rows: usize) -> Option<Vec<usize>> {
        match *self {
            Map::Same => Some((0..n_rows).collect()),
            Map::PairRows { d_head, d_rotary } => {
                let half = d_rotary / 2;
                let within = |row: usize| match row < 2 * half {
                    true => row / 2 + row % 2 * half,
                    false => row,
                };
                Some((0..n_rows).map(|row| row / d_head * d_head + within(row % d_head)).collect())
            }
            Map::NegExp | Map::Scale(_) => None,
        }
    }

    /// The other way: row `i` of the parameter is row `order[i]` of the file.
    pub fn order_back(&self, n_rows: usize) -> Option<Vec<usize>> {
        let order = self.order(n_rows)?;
        let mut back = vec![0; order.len()];
        order.iter().enumerate().for_each(|(to, &from)| back[from] = to);
        Some(back)
    }

    /// From the parameter to the file, for a map that changes numbers.
    pub fn apply(&self, x: &mut [f32], n_cols: usize) {
        match self {
            Map::Same | Map::PairRows { .. } => {}
            Map::NegExp => x.iter_mut().for_each(|x| *x = neg_exp(*x)),
            Map::Scale(runs) => each_run(runs, x, n_cols, |x, factor| *x *= factor),
        }
    }

    /// From the file to the parameter; the inverse of `apply` up to its rounding.
    pub fn invert(&self, x: &mut [f32], n_cols: usize) {
        match self {
            Map::Same | Map::PairRows { .. } => {}
            Map::NegExp => x.iter_mut().for_each(|x| *x = (-f64::from(*x)).ln() as f32),
            Map::Scale(runs) => each_run(runs, x, n_cols, |x, factor| *x /= factor),
        }
    }

    /// Steps from what comes back to what was there, where any is not zero.
    pub fn corrections(&self, x: &[f32], n_cols: usize) -> Option<Vec<i32>> {
        if self.order(0).is_some() {
            return None;
        }
        let mut back = x.to_vec();
        self.apply(&mut back, n_cols);
        self.invert(&mut back, n_cols);
        let step = |(x, back): (&f32, &f32)| x.to_bits().wrapping_sub(back.to_bits()) as i32;
        let steps: Vec<i32> = x.iter().zip(&back).map(step).collect();
        steps.iter().any(|&step| step != 0).then_some(steps)
    }

    /// `invert`, then takes each step that leads to a number whose image is in the file.
    pub fn invert_exactly(&self, x: &mut [f32], n_cols: usize, steps: &[i32]) {
        let stored = x.to_vec();
        self.invert(x, n_cols);
        if steps.len() != x.len() {
            return;
        }
        let step = |(x, step): (&f32, &i32)| f32::from_bits(x.to_bits().wrapping_add_signed(*step));
        let corrected: Vec<f32> = x.iter().zip(steps).map(step).collect();
        let mut images = corrected.clone();
        self.apply(&mut images, n_cols);
        for i in 0..x.len() {
            if images[i].to_bits() == stored[i].to_bits() {
                x[i] = corrected[i];
            }
        }
    }
}

fn neg_exp(x: f32) -> f32 {
    -f64::from(x).exp() as f32
}

fn each_run(runs: &[(usize, f32)], x: &mut [f32], n_cols: usize, change: fn(&mut f32, f32)) {
    let mut rest = x;
    for &(n_rows, factor) in runs {
        let (run, after) = rest.split_at_mut(n_rows * n_cols);
        run.iter_mut().for_each(|x| change(x, factor));
        rest = after;
    }
    assert!(rest.is_empty(), "scale: {} numbers behind the last run", rest.len());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_become_pairs_within_each_head_and_the_rest_stays() {
        let map = Map::PairRows { d_head: 6, d_rotary: 4 };
        assert_eq!(map.order(12).unwrap(), [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]);
        assert_eq!(Map::Same.order(3).unwrap(), [0, 1, 2]);
    }

    fn numbers() -> Vec<f32> {
        let rng = crate::tensor::rng::Rng::new(7, 0);
        let mut list: Vec<f32> = (0..2000).map(|n| rng.normal(n) as f32).collect();
        list.extend((0..2000).map(|n| rng.normal(n) as f32 * 1e-6));
        list.extend([0.0, -0.0, 1e-30, -88.0, 88.0, 2.7725887]);
        list
    }

    #[test]
    fn what_a_map_loses_comes_back_with_its_corrections() {
        let x = numbers();
        for map in [Map::NegExp, Map::Scale(vec![(6, 0.7), (4000, 1.9)])] {
            let mut file = x.clone();
            map.apply(&mut file, 1);
            let steps = map.corrections(&x, 1).expect("some bits are lost");
            let mut back = file.clone();
            map.invert_exactly(&mut back, 1, &steps);
            assert!(back.iter().zip(&x).all(|(a, b)| a.to_bits() == b.to_bits()), "{map:?}");
            // Without them it is close, and a changed file is not led astray by old ones.
            file[10] *= 1.5;
            let mut plain = file.clone();
            map.invert(&mut plain, 1);
            map.invert_exactly(&mut file, 1, &steps);
            assert_eq!(file[10], plain[10], "{map:?}");
            assert!(
                plain.iter().zip(&x).skip(11).all(|(a, b)| (a - b).abs() < 2e-6 * (1.0 + b.abs()))
            );
        }
    }

    #[test]
    fn a_map_that_loses_nothing_has_no_corrections() {
        assert_eq!(Map::Scale(vec![(3, 0.5)]).corrections(&[1.0, 3.0, 0.1], 1), None);
        assert_eq!(Map::PairRows { d_head: 2, d_rotary: 2 }.corrections(&[1.0, 2.0], 1), None);
    }
}
