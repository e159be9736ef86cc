//! MPI, opened at run time: whole messages between two ranks, and nothing else of it.
//!
//! | library                        | handles                                     |
//! |--------------------------------|---------------------------------------------|
//! | Open MPI                       | addresses of `ompi_mpi_comm_world`, ...     |
//! | MPICH, Intel MPI, MVAPICH      | the numbers of the common MPICH ABI         |
//!
//! Requests are asked for whether they are done, with pauses: ranks that wait leave the cores to
//! those that compute. Calls come from one thread at a time (`MPI_THREAD_SERIALIZED`).

use super::{pause, silent};
use crate::report::{Done, Failure};
use elapid::Result;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW, Symbol};
use std::ffi::{c_char, c_int, c_void};
use std::time::{Duration, Instant};

/// A communicator or a datatype: a pointer, or a number in its lower half.
type Handle = usize;
/// Large enough for the requests of both.
type Request = u64;

type InitThread = unsafe extern "C" fn(*mut c_int, *mut c_void, c_int, *mut c_int) -> c_int;
type Ask = unsafe extern "C" fn(Handle, *mut c_int) -> c_int;
type Abort = unsafe extern "C" fn(Handle, c_int) -> c_int;
type Start =
    unsafe extern "C" fn(*mut c_void, c_int, Handle, c_int, c_int, Handle, *mut Request) -> c_int;
type Test = unsafe extern "C" fn(*mut Request, *mut c_int, *mut c_void) -> c_int;
type Version = unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int;
type Finalize = unsafe extern "C" fn() -> c_int;

const SERIALIZED: c_int = 2;
/// Of the MPICH ABI: `MPI_COMM_WORLD`, `MPI_BYTE`, `MPI_STATUS_IGNORE`.
const MPICH: (Handle, Handle, usize) = (0x4400_0000, 0x4c00_010d, 1);
/// Bytes of one message: counts are `int`.
const PIECE: usize = 1 << 30;
const TAG: c_int = 21;

/// An open library of MPI.
pub struct Mpi {
    pub rank: usize,
    pub n_ranks: usize,
    world: Handle,
    byte: Handle,
    /// The pointer that means that nobody wants a status.
    ignored: usize,
    isend: Symbol<Start>,
    irecv: Symbol<Start>,
    test: Symbol<Test>,
    abort: Symbol<Abort>,
    finalize: Symbol<Finalize>,
    /// Never closed: it has threads and handlers of its own.
    _library: std::mem::ManuallyDrop<Library>,
}

fn symbol<T>(library: &Library, name: &str) -> Done<Symbol<T>> {
    // SAFETY: the types above are those of MPI's standard for these names.
    unsafe { library.get(name.as_bytes()) }.map_err(|error| {
        let problem = format!("the library of MPI has no {name}: {error}");
        Failure::new(problem, "use Open MPI 3 or newer, or one of the MPICH ABI")
    })
}

fn open_library(names: &[String]) -> Done<Library> {
    for name in names {
        // SAFETY: libraries of MPI do nothing at their loading. Global, because Open MPI loads
        // components that look for its symbols.
        if let Ok(library) = unsafe { Library::open(Some(name), RTLD_NOW | RTLD_GLOBAL) } {
            return Ok(library);
        }
    }
    let problem = format!("started by MPI's launcher, but none of {} opens", names.join(", "));
    let hint = "install the library of the MPI whose launcher this is, or name its file in \
                ELAPID_MPI";
    Err(Failure::new(problem, hint))
}

/// What the library calls itself.
fn version(library: &Library) -> Done<String> {
    let ask: Symbol<Version> = symbol(library, "MPI_Get_library_version")?;
    // MPI_MAX_LIBRARY_VERSION_STRING is 256 in Open MPI, 8192 in MPICH.
    let (mut text, mut length) = (vec![0u8; 1 << 14], 0);
    // SAFETY: the text is longer than either writes; it may be called before MPI_Init.
    unsafe { ask(text.as_mut_ptr().cast(), &mut length) };
    text.truncate(usize::try_from(length).unwrap_or(0).min(text.len()));
    Ok(String::from_utf8_lossy(&text).into_owned())
}

impl Mpi {
    /// Opens the first of these libraries and starts it.
    pub fn open(names: &[String]) -> Done<Mpi> {
        let library = std::mem::ManuallyDrop::new(open_library(names)?);
        let version = version(&library)?;
        let (world, byte, ignored) = match version.contains("Open MPI") {
            true => {
                let address = |name| -> Done<Handle> {
                    let symbol: Symbol<*mut c_void> = symbol(&library, name)?;
                    Ok(symbol.into_raw() as Handle)
                };
                (address("ompi_mpi_comm_world")?, address("ompi_mpi_byte")?, 0)
            }
            false => MPICH,
        };
        let init: Symbol<InitThread> = symbol(&library, "MPI_Init_thread")?;
        let mut provided = 0;
        let nothing: *mut c_void = std::ptr::null_mut();
        // SAFETY: MPI-2 and later take no arguments for the command line; it is called once.
        let code = unsafe { init(nothing.cast(), nothing, SERIALIZED, &mut provided) };
        if code != 0 || provided < SERIALIZED {
            let problem = format!("{} does not start for threads", version.trim());
            return Err(Failure::new(problem, "use a build with support for threads"));
        }
        let ask = |name: &str| -> Done<usize> {
            let ask: Symbol<Ask> = symbol(&library, name)?;
            let mut number = 0;
            // SAFETY: MPI is started, and it writes one number.
            unsafe { ask(world, &mut number) };
            Ok(usize::try_from(number).unwrap_or(0))
        };
        Ok(Mpi {
            rank: ask("MPI_Comm_rank")?,
            n_ranks: ask("MPI_Comm_size")?,
            world,
            byte,
            ignored,
            isend: symbol(&library, "MPI_Isend")?,
            irecv: symbol(&library, "MPI_Irecv")?,
            test: symbol(&library, "MPI_Test")?,
            abort: symbol(&library, "MPI_Abort")?,
            finalize: symbol(&library, "MPI_Finalize")?,
            _library: library,
        })
    }

    pub fn finalize(&self) {
        // SAFETY: no request is under way, and it is called once, at the end of the process.
        unsafe { (self.finalize)() };
    }

    fn start(&self, call: &Symbol<Start>, bytes: *mut u8, n: usize, peer: usize) -> Request {
        let mut request = 0;
        let (n, peer) = (n as c_int, peer as c_int);
        // SAFETY: the bytes stay borrowed until the request is done: `exchange` returns no earlier.
        // Errors of MPI end the job by its default handler.
        unsafe { call(bytes.cast(), n, self.byte, peer, TAG, self.world, &mut request) };
        request
    }

    fn is_done(&self, request: &mut Request) -> bool {
        let mut flag = 0;
        // SAFETY: the request is one that `start` began and that is not done yet.
        unsafe { (self.test)(request, &mut flag, self.ignored as *mut c_void) };
        flag != 0
    }

    /// As [`elapid::Group`] says. Where a rank does not answer in time the job is ended, because
    /// MPI may still write where the caller's bytes were.
    pub fn exchange(
        &mut self,
        outgoing: &[&[u8]],
        incoming: &mut [&mut [u8]],
        timeout: Option<Duration>,
    ) -> Result<()> {
        let mut requests: Vec<(usize, Request)> = Vec::new();
        for (peer, bytes) in incoming.iter_mut().enumerate() {
            for piece in bytes.chunks_mut(PIECE) {
                let (at, n) = (piece.as_mut_ptr(), piece.len());
                requests.push((peer, self.start(&self.irecv, at, n, peer)));
            }
        }
        for (peer, bytes) in outgoing.iter().enumerate() {
            for piece in bytes.chunks(PIECE) {
                let (at, n) = (piece.as_ptr().cast_mut(), piece.len());
                requests.push((peer, self.start(&self.isend, at, n, peer)));
            }
        }
        let (mut begin, mut n_idle) = (Instant::now(), 0u32);
        loop {
            let n = requests.len();
            requests.retain_mut(|(_, request)| !self.is_done(request));
            if requests.is_empty() {
                return Ok(());
            }
            if requests.len() < n {
                (begin, n_idle) = (Instant::now(), 0);
            }
            if let Some(timeout) = timeout.filter(|timeout| begin.elapsed() > *timeout) {
                self.give_up(&requests, timeout);
            }
            pause(&mut n_idle);
        }
    }

    fn give_up(&self, requests: &[(usize, Request)], timeout: Duration) -> ! {
        let mut peers: Vec<usize> = requests.iter().map(|request| request.0).collect();
        peers.sort_unstable();
        peers.dedup();
        let failure = Failure::from(silent(&peers, timeout));
        eprintln!("error: rank {}: {failure}", self.rank);
        // SAFETY: it ends all processes of the job, this one too.
        unsafe { (self.abort)(self.world, 1) };
        std::process::exit(1)
    }
}
