//! The one error type. `Display` says what is wrong, `hint` what to do, `source` what was below.
//!
//! Errors are for what comes from outside (files, configurations, sizes asked for). Mistakes of
//! this crate are assertions and panic with their numbers.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use thiserror::Error as ThisError;

/// What can go wrong; [`Error::hint`] says what to do about it.
#[derive(Debug, ThisError)]
#[non_exhaustive]
pub enum Error {
    /// The family is not one we know.
    #[error("{file} says `model_type: \"{family}\"`, which is not supported")]
    UnknownFamily {
        /// File the configuration came from.
        file: String,
        /// What it said.
        family: String,
        /// The families that are supported, as a list for people.
        supported: String,
    },
    /// A configuration key is missing, of the wrong type, out of range or not supported.
    #[error("{file}: `{key}`: {problem}")]
    Config {
        /// File the configuration came from.
        file: String,
        /// The key at fault.
        key: String,
        /// What is wrong with it, with the value.
        problem: String,
        /// What to do.
        hint: String,
    },
    /// A file does not follow its format.
    #[error("{file}: {problem}")]
    Format {
        /// The file.
        file: String,
        /// What is wrong, with the numbers.
        problem: String,
        /// What to do.
        hint: String,
    },
    /// The configuration asks for a tensor that no file holds.
    #[error("the weights hold no tensor `{name}`, the config asks for one of shape {shape:?}")]
    MissingTensor {
        /// Its name.
        name: String,
        /// The shape asked for.
        shape: Vec<usize>,
    },
    /// A file holds a tensor that the configuration does not ask for.
    #[error("`{name}` in {file} belongs to no layer of this config")]
    ExtraTensor {
        /// Its name.
        name: String,
        /// The file.
        file: String,
    },
    /// A tensor has another shape than the configuration asks for.
    #[error("`{name}` in {file} has shape {got:?}, the config asks for {want:?}")]
    WrongShape {
        /// Its name.
        name: String,
        /// The file.
        file: String,
        /// Shape in the file.
        got: Vec<usize>,
        /// Shape of the configuration.
        want: Vec<usize>,
    },
    /// A pattern that should select parameters selects none.
    #[error("no parameter matches {pattern:?}")]
    NoMatch {
        /// The pattern.
        pattern: String,
        /// A name that exists.
        example: String,
    },
    /// Token ids, targets or lengths that the model cannot take.
    #[error("{problem}")]
    Input {
        /// What is wrong, with the numbers.
        problem: String,
        /// What to do.
        hint: String,
    },
    /// A loss or gradient that is not finite.
    #[error("the loss is {loss} and the gradient norm {grad_norm}: nothing was changed")]
    Diverged {
        /// The loss.
        loss: f32,
        /// The norm.
        grad_norm: f64,
    },
    /// A GPU has no memory for what was asked. The work is not done; the GPU works on.
    #[error("out of memory: {device}: {problem}")]
    OutOfMemory {
        /// The GPU.
        device: String,
        /// How much was asked for, and how much there was.
        problem: String,
    },
    /// A GPU that does nothing any more: all work on it fails. What was opened anew works, and takes
    /// a checkpoint from before.
    #[error("{device} is lost: {problem}")]
    DeviceLost {
        /// The GPU.
        device: String,
        /// What it said.
        problem: String,
    },
    /// A defect of this program that ended one request.
    #[error("this request ran into a defect: {problem}")]
    Panic {
        /// What the panic said.
        problem: String,
    },
    /// A device that is not there.
    #[error("{problem}")]
    Device {
        /// What is wrong.
        problem: String,
        /// What to do.
        hint: String,
    },
    /// A file that cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// A file that cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
}

/// A result with [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Longest problem in a message, in characters. Values come from files and may be megabytes long.
const N_CHAR_MAX: usize = 600;

/// The problem without its middle, if it is too long for a person.
fn short(problem: String) -> String {
    let n_char = problem.chars().count();
    if n_char <= N_CHAR_MAX {
        return problem;
    }
    let head: String = problem.chars().take(N_CHAR_MAX - 200).collect();
    let tail: String = problem.chars().skip(n_char - 200).collect();
    format!("{head} [...] {tail}")
}

const DIFFERENT: &str = "config.json and the weights may belong to different models";

impl Error {
    /// What to do about it, in one sentence.
    pub fn hint(&self) -> Cow<'_, str> {
        match self {
            Error::UnknownFamily { supported, .. } => format!("supported are {supported}").into(),
            Error::Config { hint, .. }
            | Error::Format { hint, .. }
            | Error::Input { hint, .. }
            | Error::Device { hint, .. } => hint.into(),
            Error::MissingTensor { .. } | Error::ExtraTensor { .. } | Error::WrongShape { .. } => {
                DIFFERENT.into()
            }
            Error::OutOfMemory { .. } => "use a shorter prompt, a shorter context or a smaller \
                batch, fewer requests at once, or the CPU"
                .into(),
            Error::DeviceLost { .. } => {
                "start again, or open the device anew, and continue from the last checkpoint".into()
            }
            Error::Panic { .. } => "please report it".into(),
            Error::NoMatch { example, .. } => format!("names look like {example}").into(),
            Error::Diverged { .. } => {
                "lower the learning rate, or look at the data of this batch".into()
            }
            Error::Read { .. } => "a model is a .gguf or .elapid file, or a directory with \
                config.json and model.safetensors"
                .into(),
            Error::Write { .. } => "check the free disk space and the permissions".into(),
        }
    }

    /// The message and, in a paragraph of its own, the hint: as people see it.
    #[cfg(test)]
    pub(crate) fn report(&self) -> String {
        match &*self.hint() {
            "" => self.to_string(),
            hint => format!("{self}\n\nhint: {hint}"),
        }
    }

    /// A file that cannot be read.
    pub(crate) fn read(path: &Path, source: std::io::Error) -> Error {
        Error::Read { path: path.into(), source }
    }

    /// A file that cannot be written.
    pub(crate) fn write(path: &Path, source: std::io::Error) -> Error {
        Error::Write { path: path.into(), source }
    }

    pub(crate) fn config(file: &str, key: &str, problem: impl Into<String>, hint: &str) -> Error {
        Error::Config {
            file: file.into(),
            key: short(key.into()),
            problem: short(problem.into()),
            hint: hint.into(),
        }
    }

    pub(crate) fn format(file: &str, problem: impl Into<String>, hint: &str) -> Error {
        Error::Format { file: file.into(), problem: short(problem.into()), hint: hint.into() }
    }

    /// An input error.
    pub fn input(problem: impl Into<String>, hint: &str) -> Error {
        Error::Input { problem: short(problem.into()), hint: hint.into() }
    }
}
