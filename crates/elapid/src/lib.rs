//! Elapid's engine: trains, adapts and runs small language models on a person's own machine.
//!
//! Mamba, hybrid, Llama and mixture-of-experts models are one model with different lists of
//! layers, made of about fifteen coarse operations, each with its exact gradient.
//!
//! # Glossary
//!
//! | name       | meaning                                        | in the papers |
//! |------------|------------------------------------------------|---------------|
//! | `n_tok`    | tokens (rows) in a batch or segment            | L, T          |
//! | segment    | rows that form one sequence                    |               |
//! | `d_model`  | width of the residual stream                   | D             |
//! | `d_inner`  | channels inside a Mamba block                  | ED            |
//! | `d_state`  | state numbers kept per channel or head         | N             |
//! | `d_conv`   | taps of the causal convolution                 | K             |
//! | `d_ff`     | width inside a feed-forward                    |               |
//! | `delta`    | step size of a state-space model               | dt            |
//! | `a_log`    | decay is `-exp(a_log)`                         | A             |
//! | `skip`     | input passed around the state                  | D             |
//! | `n_head`   | heads of attention or of Mamba-2               | H             |
//! | `n_group`  | groups of heads that share B and C             | G             |
//! | `d_head`   | width of one head                              | P             |
//! | `dx`       | gradient of the loss by `x`                    |               |
//!
//! # What is not here
//!
//! No terminal, no network, no async runtime, no environment, no clock, no paths: bytes come in,
//! bytes go out.

pub mod data;
pub mod error;
pub mod eval;
pub mod files;
pub mod generate;
pub mod model;
pub mod ops;
#[cfg(feature = "fs")]
pub mod session;
pub mod tape;
pub mod tensor;
pub mod text;
pub mod train;
