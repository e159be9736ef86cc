//! Connections, signals, and the end of the server.
//!
//! A connection has a time for the headers of each request, so that clients that send a byte now
//! and then do not hold it for ever; there is a bound on connections. Where it is reached the next
//! one waits for another to end.
//!
//! SIGINT or SIGTERM ends the server: no new connections, answers under way have a while to finish,
//! a second signal ends them too.

use super::{App, Parts, router};
use crate::report::{Done, Failure};
use axum::Router;
use elapid::Generator;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;

/// For the headers of a request, and between two requests; less where a whole request has less.
const HEADER_TIME: Duration = Duration::from_secs(60);
const HEADER_BYTES_MAX: usize = 32 << 10;
const N_CONNECTIONS_MAX: usize = 512;

/// For answers under way when the server ends.
const GRACE: Duration = Duration::from_secs(10);

/// Exit code after a second signal.
const INTERRUPTED: i32 = 130;

/// Serves until a signal comes.
pub fn serve(
    listener: std::net::TcpListener,
    loaded: Generator,
    parts: Parts,
    on_ready: impl FnOnce(),
) -> Done<ExitCode> {
    let fail = |error: std::io::Error| {
        Failure::new(format!("cannot start the server: {error}"), "look at the limits of the shell")
    };
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).thread_name("http").enable_all().build();
    let runtime = runtime.map_err(fail)?;
    let (app, thread) = App::new(loaded, parts).map_err(fail)?;
    let app = Arc::new(app);
    let done = runtime.block_on(async {
        listener.set_nonblocking(true)?;
        let listener = TcpListener::from_std(listener)?;
        // Handlers are in place before anybody is told where to connect.
        let mut signals = Signals::new()?;
        on_ready();
        Ok(run(listener, app.clone(), &mut signals).await)
    });
    // What was not finished in time is cut off.
    runtime.shutdown_timeout(Duration::from_millis(100));
    app.worker.stop();
    let code = done.map_err(fail)?;
    // A thread that has panicked has said so on stderr.
    let _ = thread.join();
    Ok(code)
}

async fn run(listener: TcpListener, app: Arc<App>, signals: &mut Signals) -> ExitCode {
    let (stop, stopping) = watch::channel(false);
    let header_time = HEADER_TIME.min(app.limits.time_max);
    let accepting = accept(listener, router(app.clone()), header_time, stopping);
    let mut connections = tokio::spawn(accepting);
    let code = tokio::select! {
        () = signals.next() => {
            let seconds = GRACE.as_secs();
            eprintln!("stop    answers under way have {seconds} s; once more ends them at once");
            ExitCode::SUCCESS
        }
        () = app.worker.broken() => {
            eprintln!("stop    the engine failed too often; please report what is said above");
            ExitCode::from(1)
        }
    };
    stop.send_replace(true);
    tokio::select! {
        _ = &mut connections => {}
        () = tokio::time::sleep(GRACE) => {
            eprintln!("stop    some answers were cut off");
        }
        () = signals.next() => {
            eprintln!("stop    at once");
            std::process::exit(INTERRUPTED);
        }
    }
    code
}

/// Takes connections until the server ends, then waits for them.
async fn accept(
    listener: TcpListener,
    router: Router,
    header_time: Duration,
    mut stopping: watch::Receiver<bool>,
) {
    let room = Arc::new(Semaphore::new(N_CONNECTIONS_MAX));
    let mut tasks = JoinSet::new();
    loop {
        let next = async {
            let permit = room.clone().acquire_owned().await;
            (listener.accept().await, permit)
        };
        let (accepted, permit) = tokio::select! {
            next = next => next,
            _ = stopping.changed() => break,
        };
        match (accepted, permit) {
            (Ok((stream, _)), Ok(permit)) => {
                let (router, stopping) = (router.clone(), stopping.clone());
                tasks.spawn(connection(stream, router, header_time, stopping, permit));
            }
            // Out of file descriptors, or a client that went away at once.
            _ => tokio::time::sleep(Duration::from_millis(20)).await,
        }
        while tasks.try_join_next().is_some() {}
    }
    drop(listener);
    while tasks.join_next().await.is_some() {}
}

async fn connection(
    stream: TcpStream,
    router: Router,
    header_time: Duration,
    mut stopping: watch::Receiver<bool>,
    _permit: OwnedSemaphorePermit,
) {
    // Pieces of an answer are small and wanted at once.
    let _ = stream.set_nodelay(true);
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(header_time);
    builder.max_header_size(HEADER_BYTES_MAX);
    let service = TowerToHyperService::new(router);
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    loop {
        tokio::select! {
            // Errors here are clients that went away or do not speak HTTP.
            _ = connection.as_mut() => return,
            Ok(()) = stopping.changed() => connection.as_mut().graceful_shutdown(),
        }
    }
}

/// SIGINT and SIGTERM.
struct Signals {
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
    #[cfg(unix)]
    interrupt: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    fn new() -> std::io::Result<Signals> {
        use tokio::signal::unix::{SignalKind, signal};
        let terminate = signal(SignalKind::terminate())?;
        let interrupt = signal(SignalKind::interrupt())?;
        Ok(Signals { terminate, interrupt })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

#[cfg(not(unix))]
impl Signals {
    fn new() -> std::io::Result<Signals> {
        Ok(Signals {})
    }

    async fn next(&mut self) {
        let _ = tokio::signal::ctrl_c().await;
    }
}
