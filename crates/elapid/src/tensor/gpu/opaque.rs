//! A value whose type is not looked into where the compiler proves that something may cross
//! threads. Every tensor holds a device; without this each such proof, also in crates that use this
//! one, would walk through all of wgpu and pass the compiler's recursion limit.

use std::ops::Deref;

pub(crate) struct Opaque<T>(Box<dyn AsRef<T> + Send + Sync>);

struct Held<T>(T);

impl<T> AsRef<T> for Held<T> {
    fn as_ref(&self) -> &T {
        &self.0
    }
}

impl<T: Send + Sync + 'static> Opaque<T> {
    pub(crate) fn new(value: T) -> Opaque<T> {
        Opaque(Box::new(Held(value)))
    }
}

impl<T> Deref for Opaque<T> {
    type Target = T;
    fn deref(&self) -> &T {
        (*self.0).as_ref()
    }
}
