//! Connections, signals, and the end of the server.
//!
//! A connection has a time for the headers of each request, so that clients that send a byte now
//! and then do not hold it for ever; there is a bound on connections. Where it is reached the next
//! one waits for another to end.
//!
//! SIGINT or SIGTERM ends the server: no new connections, answers under way have a while to finish,
//! a second signal ends them too. So does an engine that is beyond help: for a while every request
//! and `/health` get the reason, then the server ends with an exit code of its own, for whatever
//! starts it again.

use super::models::Models;
use super::nearby::Nearby;
use super::{router, watch};
use crate::report::{Done, Failure};
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{self, UnboundedReceiver};
use tokio::sync::watch as channel;
use tokio::task::JoinSet;

/// For the headers of a request, and between two requests; less where a whole request has less.
const HEADER_TIME: Duration = Duration::from_secs(60);
const HEADER_BYTES_MAX: usize = 32 << 10;
const N_CONNECTIONS_MAX: usize = 512;

/// For answers under way when the server ends.
const GRACE: Duration = Duration::from_secs(10);

/// For `/health` and `/metrics` to be asked when the engine is beyond help.
const LINGER: Duration = Duration::from_secs(2);

/// Exit code when the engine is beyond help: EX_UNAVAILABLE.
const UNAVAILABLE: u8 = 69;

/// Exit code after a second signal.
const INTERRUPTED: i32 = 130;

pub fn serve(
    listener: std::net::TcpListener,
    models: Arc<Models>,
    watched: Vec<watch::Watched>,
    on_ready: impl FnOnce(),
) -> Done<ExitCode> {
    let fail = |error: std::io::Error| {
        Failure::new(format!("cannot start the server: {error}"), "look at the limits of the shell")
    };
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).thread_name("http").enable_all().build();
    let runtime = runtime.map_err(fail)?;
    let warming = models.shared.clone();
    std::thread::spawn(move || warming.nearby.iter().for_each(Nearby::warm_up));
    let done = runtime.block_on(async {
        listener.set_nonblocking(true)?;
        let listener = TcpListener::from_std(listener)?;
        // Handlers are in place before anybody is told where to connect.
        let (sender, mut signals) = mpsc::unbounded_channel();
        let told = ctrlc::set_handler(move || _ = sender.send(()));
        told.map_err(std::io::Error::other)?;
        if let Some(idle) = models.shared.settings.idle {
            tokio::spawn(unload_idle(models.clone(), idle));
        }
        watched.into_iter().for_each(|dir| _ = tokio::spawn(dir.follow(models.clone())));
        on_ready();
        Ok(run(listener, models.clone(), &mut signals).await)
    });
    // What was not finished in time is cut off.
    runtime.shutdown_timeout(Duration::from_millis(100));
    models.stop();
    done.map_err(fail)
}

/// Looks now and then which models nobody uses.
async fn unload_idle(models: Arc<Models>, idle: Duration) {
    loop {
        tokio::time::sleep((idle / 4).min(Duration::from_secs(5))).await;
        models.unload_idle(idle).await;
    }
}

/// A signal is an item of `signals`.
async fn run(
    listener: TcpListener,
    models: Arc<Models>,
    signals: &mut UnboundedReceiver<()>,
) -> ExitCode {
    let (stop, stopping) = channel::channel(false);
    let header_time = HEADER_TIME.min(models.shared.settings.time_max);
    let accepting = accept(listener, router(models.clone()), header_time, stopping);
    let mut broken = models.shared.broken.subscribe();
    let mut connections = tokio::spawn(accepting);
    let code = tokio::select! {
        _ = signals.recv() => {
            let seconds = GRACE.as_secs();
            eprintln!("stop    answers under way have {seconds} s; once more ends them at once");
            ExitCode::SUCCESS
        }
        why = async { broken.wait_for(Option::is_some).await.ok().and_then(|it| it.clone()) } => {
            let why = why.map_or("the engine has ended".into(), |why| why.message);
            eprintln!("stop    nothing can be answered any more: {why}");
            tokio::time::sleep(LINGER).await;
            ExitCode::from(UNAVAILABLE)
        }
    };
    stop.send_replace(true);
    tokio::select! {
        _ = &mut connections => {}
        () = tokio::time::sleep(GRACE) => {
            eprintln!("stop    some answers were cut off");
        }
        _ = signals.recv() => {
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
    mut stopping: channel::Receiver<bool>,
) {
    let mut tasks = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if tasks.len() < N_CONNECTIONS_MAX => match accepted {
                Ok((stream, _)) => {
                    let (router, stopping) = (router.clone(), stopping.clone());
                    tasks.spawn(connection(stream, router, header_time, stopping));
                }
                // Out of file descriptors, or a client that went away at once.
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            },
            Some(_) = tasks.join_next() => {}
            _ = stopping.changed() => break,
        }
    }
    drop(listener);
    while tasks.join_next().await.is_some() {}
}

async fn connection(
    stream: TcpStream,
    router: Router,
    header_time: Duration,
    mut stopping: channel::Receiver<bool>,
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
