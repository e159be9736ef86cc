//! What comes later: bytes on their way from a GPU, and who waits for them.
//!
//! A program of its own waits by `block_on`, inside the driver. A browser cannot: there a future
//! stays pending until the page's event loop has brought the bytes.

use crate::error::{Error, Result};
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

/// What a future gives; nothing in a browser where it is not there yet, since it never comes to a
/// thread that waits.
#[cfg(not(target_family = "wasm"))]
pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> Option<T> {
    Some(pollster::block_on(future))
}

#[cfg(target_family = "wasm")]
pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> Option<T> {
    match std::pin::pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    }
}

/// The result of a future; an error in a browser where it is not there yet.
pub(crate) fn wait<T>(future: impl Future<Output = Result<T>>) -> Result<T> {
    block_on(future).unwrap_or_else(|| {
        let problem = "a browser cannot wait for its GPU".into();
        Err(Error::Device { problem, hint: "use the function that is awaited, or the CPU".into() })
    })
}

/// A value that a callback will set.
pub(super) struct Later<T>(Arc<Mutex<(Option<T>, Option<Waker>)>>);

impl<T> Clone for Later<T> {
    fn clone(&self) -> Later<T> {
        Later(self.0.clone())
    }
}

impl<T> Later<T> {
    pub(super) fn new() -> Later<T> {
        Later(Arc::new(Mutex::new((None, None))))
    }

    pub(super) fn set(&self, value: T) {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        held.0 = Some(value);
        if let Some(waker) = held.1.take() {
            drop(held);
            waker.wake();
        }
    }
}

impl<T> Future for Later<T> {
    type Output = T;

    fn poll(self: std::pin::Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match held.0.take() {
            Some(value) => Poll::Ready(value),
            None => {
                held.1 = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}
