//! Train, adapt and run small language models on a person's own machine.
//!
//! Mamba, hybrid, Llama and mixture-of-experts models; CPU, wgpu and CUDA; GGUF, Hugging Face
//! directories and PEFT adapters. Nothing leaves the machine.
//!
//! # How do I ...
//!
//! | ... | with | example |
//! |-----|------|---------|
//! | open a model and generate        | [`Session::open`], [`Session::generate`] | `generate.rs` |
//! | get the answer while it is made  | [`Session::stream`], [`Session::tokens`] | `stream.rs` |
//! | chat                             | [`Session::chat`]                        | `chat.rs` |
//! | fill a gap in code               | [`Session::infill`]                      | |
//! | train from scratch               | [`Session::scratch`], [`Session::train`] | `train.rs` |
//! | adapt a model with LoRA          | [`Session::adapt`], [`Method`]           | `lora.rs` |
//! | resume a training                | [`Training::save`], [`Training::resume`] | `train.rs` |
//! | see whether it got better        | [`Session::score`], [`compare`]          | `compare.rs` |
//! | get embeddings                   | [`Session::embed`]                       | `embed.rs` |
//! | convert or quantise              | [`Model::convert`], [`Mix`]              | `convert.rs` |
//! | answer many requests at once     | [`Generator`], [`Engine`], [`Request`]   | |
//! | move a state of eight numbers    | [`Limbic`], [`LimbicState`]              | `limbic.rs` |
//! | use a GPU                        | [`Device::by_name`]                      | |
//!
//! ```
//! use elapid::{Arch, Batches, Device, Result, Session, Settings, Size};
//! use std::ops::ControlFlow;
//!
//! fn main() -> Result<()> {
//!     let text = "fn add(a: i32, b: i32) -> i32 {\n    a + b\n}\n".repeat(20);
//!     let mut session = Session::scratch(Size::Tiny, Arch::Hybrid, &text, &Device::cpu(2)?)?;
//!     let settings = Settings { n_steps: 3, ..Settings::default() };
//!     let batches = Batches { context: 32, n_rows: 2, ..Batches::default() };
//!     session.train(&text, &batches, &settings, |step, loss| {
//!         println!("step {step} loss {loss}");
//!         ControlFlow::Continue(())
//!     })?;
//!     let request = session.request("fn add(")?.max_tokens(8).temperature(0.0);
//!     println!("{}", session.tokens(request)?.text()?);
//!     Ok(())
//! }
//! ```
//!
//! A model that is there is opened by its path, and every [`Error`] says what to do:
//!
//! ```
//! # use elapid::{Device, Session};
//! # fn main() -> elapid::Result<()> {
//! match Session::open("no-such-model.gguf", &Device::cpu(1)?) {
//!     Ok(mut session) => println!("{}", session.generate("fn main() {")?),
//!     Err(error) => eprintln!("{error}\nhint: {}", error.hint()),
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Without a file system
//!
//! The default feature `fs` opens and saves by paths. Without it bytes come in:
//! [`Model::from_gguf`] and [`Model::from_files`] make the model that [`Session::new`] and
//! [`Generator::new`] take. Adapters on disk, conversion and golden sets need `fs`. In a browser,
//! paths lead to files that are held in memory: `write` puts one in, `take_files` takes them out.
//! The library never touches a terminal, the network, the environment or a clock.
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

// What writes files is reached by paths alone. Without them it is not called and not linked, but
// stays checked: a feature on every part of it would be a maze. So it is with what waits for a
// device, and with what other CPUs have, in a browser.
#![cfg_attr(
    any(not(feature = "fs"), target_family = "wasm"),
    allow(dead_code, unused_imports, unused_variables)
)]

#[cfg(target_family = "wasm")]
mod awaited;
mod data;
mod error;
mod eval;
mod files;
/// What the fuzz targets run; no part of the API.
#[cfg(any(test, fuzzing))]
#[path = "../../../lab/fuzz/targets.rs"]
pub mod fuzz_targets;
mod generate;
mod model;
mod ops;
mod session;
mod tape;
mod tensor;
#[cfg(test)]
mod tests;
mod text;
mod train;

pub use data::corpus::Corpus;
pub use data::filter::{BYTE_MAX, Reason as Unwanted, unwanted_content, unwanted_path};
pub use data::language::of_path as language_of_path;
pub use data::near::{Signature, compare as near_copies};
pub use data::records::{ChatStyle, record as document_of_record};
pub use data::split::{
    Split, SplitBy, SplitItem, cut as cut_end, hash as name_hash, split, too_little,
};
pub use data::{Document, Encoded, Ends, Part};
pub use error::{Error, Result};
#[cfg(feature = "fs")]
pub use eval::bench::{GenerateBench, TrainBench};
#[cfg(feature = "fs")]
pub use eval::convert::{Conversion, Same};
#[cfg(feature = "fs")]
pub use eval::golden::{Comparison as GoldenComparison, check_directory as check_golden};
pub use eval::{
    Comparison, DocScore, EvalSettings, FimDoc, FimReport, FimSettings, Interval, Resampled, Score,
    Summary, Verdict, compare,
};
pub use files::Sink;
#[cfg(all(feature = "fs", target_arch = "wasm32"))]
pub use files::disk::take_files;
#[cfg(feature = "fs")]
pub use files::disk::{read_text, write};
pub use files::package::{OutFile as PackageFile, Package, write as write_package};
pub use generate::engine::{
    Constraint, Engine, EngineSettings, Event, Finish, Reason, Refusal, Request, RequestId, Stats,
    Token,
};
pub use generate::generator::{
    Chat, Generator, GeneratorSettings, LoadedAdapter, Suggested, empty_prompt,
};
pub use generate::sample::Sampling;
#[cfg(feature = "fs")]
pub use model::adapter::{Adapter, AdapterInfo};
pub use model::checkpoint::Checkpoint as Model;
pub use model::config::FAMILIES;
pub use model::config::preset::{Arch, Size};
pub use model::export::Mix;
pub use model::info::ModelInfo;
#[cfg(feature = "fs")]
pub use model::save::Form;
pub use model::state::CacheType;
pub use ops::sources::kernel_sources;
pub use session::{Batches, Session, Snapshot, Tokens};
pub use tensor::SharedBytes;
pub use tensor::device::Device;
pub use tensor::devices::DeviceInfo;
pub use tensor::failpoint::{hit as hit_failpoint, install as install_failpoints};
pub use tensor::gpu::Precision;
pub use tensor::gpu::profile::KernelTime;
pub use tensor::shelf::MemoryUse;
pub use text::chat::{ChatOptions, ChatTemplate, DateTime, Message};
pub use text::fim::{FimContext, FimFile, FimTokens};
pub use text::tokenizer::{BpeTrainer, Special, Tokenizer};
pub use train::limbic::{Limbic, LimbicSample, LimbicScore, LimbicSettings, LimbicState};
pub use train::method::{Coverage, Form as LoraForm, LoraSettings, Method, Scaling};
pub use train::optim::OptimizerKind;
pub use train::plan::{Fixed, Probe, foretell};
pub use train::schedule::Schedule;
pub use train::scratch::{Shape, Texts, Vocabulary};
pub use train::state::{Capture, Extent, Saved};
pub use train::{Outcome, Progress, Settings, StepReport, Training, Turn};
