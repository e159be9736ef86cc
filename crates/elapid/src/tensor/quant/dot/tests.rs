//! Products on blocks against their twin in f64, on every instruction set of the machine.

use super::*;
use crate::tensor::cpu::Pool;
use crate::tensor::rng::Rng;

fn numbers(n: usize, seed: u64) -> Vec<f32> {
    let rng = Rng::new(seed, 0);
    (0..n).map(|i| rng.normal(i as u64) as f32).collect()
}

/// A matrix of normal numbers in blocks, and what it decodes to.
fn matrix(block: BlockType, n_row: usize, d_in: usize) -> (Vec<u8>, Vec<f32>) {
    let w = numbers(n_row * d_in, 1);
    let mut bytes = vec![0; w.len() / block.n_elem() * block.n_bytes()];
    block.encode(&w, &mut bytes);
    let mut decoded = vec![0.0; w.len()];
    block.decode(&bytes, &mut decoded);
    (bytes, decoded)
}

/// The inputs after rounding.
fn rounded_numbers(rounded: &Rounded, n_tok: usize) -> Vec<f32> {
    let Inputs::Rounded(groups, _) = rounded.of(&(0..n_tok)) else { panic!("rounded inputs") };
    let mut out = vec![[0.0; 32]; groups.len()];
    groups.iter().zip(&mut out).for_each(|(group, out)| group.decode(out));
    out.concat()
}

/// `w[row] . x[t]` and the sum of the magnitudes of its terms.
fn twin(w: &[f32], x: &[f32]) -> (f64, f64) {
    let terms = w.iter().zip(x).map(|(w, x)| *w as f64 * *x as f64);
    terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()))
}

fn assert_products(what: &str, [w, x]: [&[f32]; 2], d_in: usize, y: impl Fn(usize, usize) -> f32) {
    for (row, w) in w.chunks(d_in).enumerate() {
        for (t, x) in x.chunks(d_in).enumerate() {
            let (want, size) = twin(w, x);
            let error = (y(row, t) as f64 - want).abs();
            // The sums of groups that minima are multiplied with are rounded to f16.
            let rough = ["Q4_1", "Q5_1"].iter().any(|name| what.starts_with(name));
            assert!(
                error <= if rough { 5e-4 } else { 1e-6 } * size,
                "{what}: row {row}, input {t}: {error} of {size}"
            );
        }
    }
}

/// Every format that is multiplied in blocks, with widths of odd and even numbers of groups.
fn cases() -> impl Iterator<Item = (BlockType, usize)> {
    let widths = |block: BlockType| if block.n_elem() == 32 { [96, 320] } else { [256, 768] };
    BlockType::ALL.into_iter().flat_map(move |block| widths(block).map(|d_in| (block, d_in)))
}

#[test]
fn products_on_blocks_are_those_of_the_decoded_numbers_on_every_instruction_set() {
    for (block, d_in) in cases() {
        let (bytes, w) = matrix(block, 5, d_in);
        for n_tok in [1, 2, 4, 7] {
            let x = numbers(n_tok * d_in, 2);
            let rounding = Rounding::of(block).unwrap();
            let rounded = Rounded::few(&Pool::default(), &x, d_in, rounding);
            let x = rounded_numbers(&rounded, n_tok);
            for set in Set::all() {
                let mut y = vec![f32::NAN; 5 * n_tok];
                let rows = Rows::Blocks(block, &bytes);
                set.products(rows, rounded.of(&(0..n_tok)), n_tok, &mut y);
                let what = format!("{block:?} {d_in} {}", set.name());
                assert_products(&what, [&w, &x], d_in, |row, t| y[row * n_tok + t]);
            }
        }
    }
}

#[test]
fn products_of_floats_are_right_for_every_width_and_form() {
    for d_in in [1, 7, 8, 48, 100] {
        let (w, x) = (numbers(6 * d_in, 1), numbers(3 * d_in, 2));
        let f16: Vec<half::f16> = w.iter().map(|w| half::f16::from_f32(*w)).collect();
        let bf16: Vec<half::bf16> = w.iter().map(|w| half::bf16::from_f32(*w)).collect();
        let forms: [(Rows, Vec<f32>); 3] = [
            (Rows::F32(&w), w.clone()),
            (Rows::F16(bytemuck::cast_slice(&f16)), f16.iter().map(|w| w.to_f32()).collect()),
            (Rows::BF16(bytemuck::cast_slice(&bf16)), bf16.iter().map(|w| w.to_f32()).collect()),
        ];
        for (rows, w) in forms {
            for set in Set::all() {
                let mut y = vec![f32::NAN; 6 * 3];
                set.products(rows, Inputs::Floats(&x), 3, &mut y);
                assert_products(set.name(), [&w, &x], d_in, |row, t| y[row * 3 + t]);
            }
        }
    }
}

#[test]
fn a_product_does_not_depend_on_the_inputs_beside_it() {
    for (block, d_in) in cases() {
        let (bytes, _) = matrix(block, 3, d_in);
        let x = numbers(9 * d_in, 2);
        let rounded = Rounded::few(&Pool::default(), &x, d_in, Rounding::of(block).unwrap());
        for set in Set::all() {
            let rows = Rows::Blocks(block, &bytes);
            let mut together = vec![0.0; 3 * 9];
            set.products(rows, rounded.of(&(0..9)), 9, &mut together);
            for t in 0..9 {
                let mut alone = vec![0.0; 3];
                set.products(rows, rounded.of(&(t..t + 1)), 1, &mut alone);
                let same =
                    (0..3).all(|row| alone[row].to_bits() == together[row * 9 + t].to_bits());
                assert!(same, "{block:?} {d_in} {} input {t}", set.name());
            }
        }
    }
}

#[test]
fn strips_give_the_same_products_also_of_the_last_few_rows() {
    let Some(set) = Set::all().into_iter().find(|set| set.has_strips()) else {
        eprintln!("skipped: this machine has no instruction for strips");
        return;
    };
    for (block, d_in) in cases() {
        for (n_row, n_tok) in [(16, 19), (5, 8)] {
            let (bytes, w) = matrix(block, n_row, d_in);
            let x = numbers(n_tok * d_in, 2);
            let rounded = Rounded::few(&Pool::default(), &x, d_in, Rounding::of(block).unwrap());
            let x = rounded_numbers(&rounded, n_tok);
            let Inputs::Rounded(groups, _) = rounded.of(&(0..n_tok)) else { panic!("rounded") };
            let mut y = vec![f32::NAN; n_tok * N_ROW];
            set.strip(block, &bytes, &Many::new(groups, n_tok), &mut y);
            let what = format!("{block:?} {d_in} {n_row}");
            assert_products(&what, [&w, &x], d_in, |row, t| y[t * N_ROW + row]);
        }
    }
}

/// Products of one group, lane by lane.
fn lanes<I: Isa>(isa: I, u: &[u8; 32], x: &[i8; 32]) -> [[f32; 8]; 2] {
    let negated =
        std::array::from_fn(|lane| -x[4 * lane..][..4].iter().map(|x| *x as i32).sum::<i32>());
    let masked = isa.field::<1>(isa.bytes(u), 127);
    let signed = isa.dot_signed(isa.bytes(u), x, &negated);
    let unsigned = isa.dot(masked, x, isa.shifted::<3>(&negated));
    [isa.to_array(isa.to_floats(signed)), isa.to_array(isa.to_floats(unsigned))]
}

#[test]
fn each_lane_holds_the_products_of_its_own_four_bytes() {
    let rng = Rng::new(4, 0);
    for case in 0..50 {
        let u = std::array::from_fn(|i| rng.below(case * 64 + i as u64, 256) as u8);
        let x =
            std::array::from_fn(|i| (rng.below(case * 64 + 32 + i as u64, 255) as i32 - 127) as i8);
        let want = lanes(Plain, &u, &x);
        #[cfg(target_arch = "x86_64")]
        {
            let found = [
                x86::Avx2::detect().map(|isa| lanes(isa, &u, &x)),
                x86::Vnni::detect().map(|isa| lanes(isa, &u, &x)),
            ];
            found.into_iter().flatten().for_each(|found| assert_eq!(found, want));
        }
        #[cfg(target_arch = "aarch64")]
        if let Some(isa) = neon::Neon::detect() {
            assert_eq!(lanes(isa, &u, &x), want);
        }
    }
}

#[test]
fn rounding_keeps_zeros_and_extremes_and_errs_by_half_a_step_at_most() {
    let mut x = numbers(512, 3);
    x[..32].fill(0.0);
    x[300] = -9.5;
    for rounding in [Rounding::Groups, Rounding::Eights] {
        let y = rounded_numbers(&Rounded::few(&Pool::default(), &x, 512, rounding), 1);
        assert!(y[..32].iter().all(|y| *y == 0.0));
        assert!((y[300] + 9.5).abs() < 0.005, "{rounding:?}: {}", y[300]);
        let per_scale = if rounding == Rounding::Groups { 32 } else { 256 };
        for (x, y) in x.chunks(per_scale).zip(y.chunks(per_scale)) {
            let step = x.iter().fold(0f32, |max, x| max.max(x.abs())) / 127.0;
            let worst = x.iter().zip(y).fold(0f32, |worst, (x, y)| worst.max((x - y).abs()));
            // The scale of a group is rounded to f16 behind the integers.
            assert!(worst <= 0.5 * step + 127.0 * step / 2048.0, "{rounding:?}: {worst} {step}");
        }
    }
}

#[test]
fn rounded_inputs_return_to_the_pool() {
    let (pool, x) = (Pool::default(), numbers(40 * 512, 5));
    for _ in 0..3 {
        Rounded::new(&pool, &x, 512, Rounding::Groups);
        Rounded::few(&pool, &x, 512, Rounding::Eights);
    }
    let usage = pool.usage();
    let n_kinds = 1 + usize::from(Set::best().has_strips());
    assert_eq!((usage.n_alloc, usage.live), (n_kinds, 0));
}
