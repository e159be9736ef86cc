//! `elapid._native`: the engine for Python. What people see is in `python/elapid`.
//!
//! A thin layer: text, numbers and JSON come in, numbers and JSON go out. Everything that computes
//! runs without the interpreter's lock, under the lock of its session; nothing below that lock
//! calls Python, so the two cannot wait for each other.

mod ask;
mod measure;
mod train;

use ask::Answer;
use elapid::{Arch, Device, Document, Form, Model, Precision, Size, Special};
use measure::Scores;
use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard};
use train::Run;

create_exception!(
    elapid,
    Error,
    PyException,
    "What the engine refuses. `hint` says what to do about it."
);

/// An error for Python, with its hint as an attribute and below the traceback.
fn raise(error: elapid::Error) -> PyErr {
    let raised = Error::new_err(error.to_string());
    let hint = error.hint();
    Python::attach(|py| {
        let value = raised.value(py);
        value.setattr("hint", &*hint)?;
        match &*hint {
            "" => Ok(()),
            hint => value.call_method1("add_note", (format!("hint: {hint}"),)).map(drop),
        }
    })
    .map_or_else(|error: PyErr| error, |()| raised)
}

/// Computes without the interpreter's lock.
fn apart<T: Send>(py: Python<'_>, work: impl FnOnce() -> elapid::Result<T> + Send) -> PyResult<T> {
    py.detach(work).map_err(raise)
}

/// JSON that Python wrote.
fn read<T: DeserializeOwned>(json: &str) -> elapid::Result<T> {
    serde_json::from_str(json).map_err(|error| {
        elapid::Error::input(format!("a setting does not fit: {error}"), "see help(elapid)")
    })
}

/// Settings with what a JSON object says in place of their defaults.
fn overlaid<T: Serialize + DeserializeOwned>(defaults: &T, json: &str) -> elapid::Result<T> {
    let refuse = |problem: String, hint: &str| elapid::Error::input(problem, hint);
    let given: serde_json::Map<String, Value> = read(json)?;
    let mut all = serde_json::to_value(defaults)
        .map_err(|error| refuse(error.to_string(), "please report it"))?;
    for (key, value) in given {
        let Some(place) = all.get_mut(&key) else {
            let known = all.as_object().map(|all| all.keys().cloned().collect::<Vec<_>>());
            let hint = format!("there are {}", known.unwrap_or_default().join(", "));
            return Err(refuse(format!("there is no setting `{key}`"), &hint));
        };
        *place = value;
    }
    serde_json::from_value(all)
        .map_err(|error| refuse(format!("a setting does not fit: {error}"), "see help(elapid)"))
}

fn device(name: &str, threads: Option<usize>) -> elapid::Result<Device> {
    let of_machine = || std::thread::available_parallelism().map_or(1, usize::from);
    Device::by_name(name, Precision::default(), threads.unwrap_or_else(of_machine))
}

/// One of a list, by its name.
fn by_name<T: Copy + ToString>(what: &str, name: &str, all: &[T]) -> elapid::Result<T> {
    all.iter().find(|one| one.to_string() == name).copied().ok_or_else(|| {
        let names: Vec<String> = all.iter().map(T::to_string).collect();
        let hint = format!("there are {}", names.join(", "));
        elapid::Error::input(format!("there is no {what} `{name}`"), &hint)
    })
}

fn documents(texts: Vec<(String, String)>) -> Vec<Document> {
    texts.into_iter().map(|(name, text)| Document::whole(name, text)).collect()
}

/// A model on a device, for one thread at a time.
#[pyclass(module = "elapid._native", frozen)]
struct Session {
    inner: Mutex<Inner>,
}

struct Inner {
    session: elapid::Session,
    /// While there is one, the weights are in it.
    run: Option<Run>,
    /// What answers that are not read yet have to say.
    answers: ask::Answers,
}

impl Inner {
    /// The session, where its weights are not in a training.
    fn idle(&mut self) -> elapid::Result<&mut elapid::Session> {
        match self.run {
            None => Ok(&mut self.session),
            Some(_) => Err(elapid::Error::input(
                "the model is in training",
                "finish or close its Trainer; `Trainer(eval_texts=...)` measures on the way",
            )),
        }
    }
}

impl Session {
    fn new(session: elapid::Session) -> Session {
        let inner = Inner { session, run: None, answers: ask::Answers::default() };
        Session { inner: Mutex::new(inner) }
    }

    fn lock(&self) -> elapid::Result<MutexGuard<'_, Inner>> {
        self.inner.lock().map_err(|_| {
            elapid::Error::input("an earlier call ran into a defect", "load the model again")
        })
    }
}

#[pymethods]
impl Session {
    #[staticmethod]
    #[pyo3(signature = (path, adapter, device, threads))]
    fn open(
        py: Python<'_>,
        path: PathBuf,
        adapter: Option<PathBuf>,
        device: &str,
        threads: Option<usize>,
    ) -> PyResult<Session> {
        apart(py, || {
            let model = Model::open(path)?;
            let model = match adapter {
                Some(adapter) => model.with_adapter(adapter),
                None => model,
            };
            Ok(Session::new(elapid::Session::new(model, &self::device(device, threads)?)?))
        })
    }

    #[staticmethod]
    #[pyo3(signature = (text, size, arch, device, threads))]
    fn scratch(
        py: Python<'_>,
        text: &str,
        size: &str,
        arch: &str,
        device: &str,
        threads: Option<usize>,
    ) -> PyResult<Session> {
        apart(py, || {
            let (size, arch) =
                (by_name("size", size, &Size::ALL)?, by_name("architecture", arch, &Arch::ALL)?);
            let device = self::device(device, threads)?;
            Ok(Session::new(elapid::Session::scratch(size, arch, text, &device)?))
        })
    }

    /// What can be said of the model.
    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let info = apart(py, || self.lock()?.session.model().info())?;
        let dict = PyDict::new(py);
        dict.set_item("name", info.name)?;
        dict.set_item("family", info.family)?;
        dict.set_item("n_layer", info.n_layer)?;
        dict.set_item("d_model", info.d_model)?;
        dict.set_item("n_vocab", info.n_vocab)?;
        dict.set_item("n_ctx", info.n_ctx)?;
        dict.set_item("n_params", info.n_params)?;
        Ok(dict)
    }

    fn encode(&self, py: Python<'_>, text: &str) -> PyResult<Vec<u32>> {
        apart(py, || self.lock()?.session.tokenizer().encode(text, Special::Plain))
    }

    fn decode(&self, py: Python<'_>, ids: Vec<u32>) -> PyResult<String> {
        apart(py, || Ok(self.lock()?.session.tokenizer().decode(&ids, Special::Parse)))
    }

    /// The numbers of a vector as f32 in the order of this machine.
    fn embed<'py>(&self, py: Python<'py>, text: &str) -> PyResult<Bound<'py, PyBytes>> {
        let vector = apart(py, || self.lock()?.idle()?.embed(text))?;
        let bytes: Vec<u8> = vector.iter().flat_map(|number| number.to_ne_bytes()).collect();
        Ok(PyBytes::new(py, &bytes))
    }

    fn generate(self_: Py<Session>, py: Python<'_>, text: &str, options: &str) -> PyResult<Answer> {
        Answer::new(self_, py, options, |session| session.request(text))
    }

    fn infill(
        self_: Py<Session>,
        py: Python<'_>,
        prefix: &str,
        suffix: &str,
        options: &str,
    ) -> PyResult<Answer> {
        Answer::new(self_, py, options, |session| session.infill(prefix, suffix))
    }

    fn chat(self_: Py<Session>, py: Python<'_>, messages: &str, options: &str) -> PyResult<Answer> {
        Answer::new(self_, py, options, |session| session.chat(&read::<Vec<_>>(messages)?))
    }

    fn score(
        &self,
        py: Python<'_>,
        texts: Vec<(String, String)>,
        context: usize,
    ) -> PyResult<Scores> {
        apart(py, || {
            let mut inner = self.lock()?;
            let settings = measure::settings(context)?;
            let documents = documents(texts);
            match &inner.run {
                Some(run) => run.score(&documents, inner.session.tokenizer(), &settings),
                None => inner.session.score(&documents, &settings, &mut |_, _| {}),
            }
            .map(Scores::new)
        })
    }

    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        apart(py, || {
            let mut inner = self.lock()?;
            match &inner.run {
                Some(run) => inner.session.save_from(&run.training, path),
                None => inner.session.save(path),
            }
        })
    }

    /// Chooses what is trained: numbers that are, and numbers in all.
    #[pyo3(signature = (method, lora, quant, seed))]
    fn adapt(
        &self,
        py: Python<'_>,
        method: &str,
        lora: &str,
        quant: Option<&str>,
        seed: u64,
    ) -> PyResult<(usize, usize)> {
        apart(py, || {
            let method = train::method(method, lora)?;
            let mut inner = self.lock()?;
            let found = inner.idle()?.adapt(&method, quant, seed)?;
            inner.answers.forget();
            Ok((found.n_trained, found.n_all))
        })
    }

    /// Starts a training; `batches` and `settings` are JSON objects.
    fn begin(
        &self,
        py: Python<'_>,
        texts: Vec<(String, String)>,
        batches: &str,
        settings: &str,
    ) -> PyResult<()> {
        apart(py, || {
            let mut inner = self.lock()?;
            let run = Run::begin(inner.idle()?, &documents(texts), batches, settings)?;
            inner.answers.forget();
            inner.run = Some(run);
            Ok(())
        })
    }

    /// The next step: its number, loss, gradient norm, learning rate and tokens so far; none where
    /// all are made.
    fn step(&self, py: Python<'_>) -> PyResult<Option<train::Step>> {
        apart(py, || train::running(&mut self.lock()?.run)?.step())
    }

    fn save_checkpoint(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        apart(py, || train::running(&mut self.lock()?.run)?.save(path))
    }

    /// Continues from a checkpoint; the steps that it has made.
    fn resume(&self, py: Python<'_>, path: PathBuf) -> PyResult<u64> {
        apart(py, || train::running(&mut self.lock()?.run)?.resume(path))
    }

    /// Gives the weights of a training back, where there is one.
    fn end(&self, py: Python<'_>) -> PyResult<()> {
        apart(py, || {
            let mut inner = self.lock()?;
            if let Some(run) = inner.run.take() {
                inner.session.end(run.training);
            }
            Ok(())
        })
    }
}

/// Writes a model in another form or type: bytes, how close it is, who cannot read it.
#[pyfunction]
#[pyo3(signature = (model, path, mix))]
fn convert(
    py: Python<'_>,
    model: PathBuf,
    path: PathBuf,
    mix: Option<&str>,
) -> PyResult<(u64, String, Option<&'static str>)> {
    apart(py, || {
        let (form, mix) = (Form::from(path.as_path()), mix.map(str::parse).transpose()?);
        let model = Model::open(model)?;
        let done = model.convert(&path, form, mix, &device("cpu", None)?, &mut |_, _| {})?;
        Ok((done.n_bytes, done.verdict.to_string(), done.note))
    })
}

/// The devices of this machine: what `device` takes, and what they are.
#[pyfunction]
fn devices(py: Python<'_>) -> PyResult<Vec<(String, String)>> {
    let n_threads = std::thread::available_parallelism().map_or(1, usize::from);
    let list = apart(py, || Device::list(n_threads))?;
    Ok(list.into_iter().map(|device| (device.id, device.name)).collect())
}

#[pymodule]
mod _native {
    #[pymodule_export]
    use super::{Answer, Error, Scores, Session, convert, devices};
}
