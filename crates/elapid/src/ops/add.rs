//! Sum of two tensors of one shape: `y = a + b`.
//!
//! Backward: both gradients are `dy` itself, shared and not copied.

use crate::tape::{Tape, Var};
use crate::tensor::add::sum;

/// `a + b`.
pub fn add(tape: &Tape, a: &Var, b: &Var) -> Var {
    let y = sum(a.value(), b.value());
    tape.record("add", &[a, b], y, |dy| vec![Some(dy.clone()), Some(dy)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::check::{Input, check_gradients};

    #[test]
    fn gradients() {
        for n in [1, 19, 70_001] {
            let inputs = [Input::normal(1, &[n], 1.0), Input::normal(2, &[n], 1.0)];
            check_gradients(&inputs, |tape, vars| vec![add(tape, &vars[0], &vars[1])]);
        }
    }
}
