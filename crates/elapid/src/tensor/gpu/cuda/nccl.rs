//! NCCL between the GPUs of several processes, opened at run time: whole messages between two
//! ranks, and nothing else of it. Sums are made by our own kernels, in an order of our own.
//!
//! Messages have a stream of their own. They wait for everything that the device was given before,
//! and the device continues. `join` makes what follows on the device wait for them. Whoever gives a
//! tensor keeps it until then: a pool would give its memory to others.

use super::Context;
use crate::tensor::Tensor;
use cudarc::driver::CudaStream;
use cudarc::nccl::{result, sys};
use std::ffi::c_char;
use std::sync::Arc;

/// Bytes of what ranks meet by.
pub(crate) const ID_BYTES: usize = 128;

/// This GPU among those of a group.
pub(crate) struct Nccl {
    comm: sys::ncclComm_t,
    stream: Arc<CudaStream>,
    context: Arc<Context>,
}

// SAFETY: a communicator may be used from any thread, by one at a time; its user holds a lock.
unsafe impl Send for Nccl {}
// SAFETY: as above.
unsafe impl Sync for Nccl {}

/// Whether the library can be opened.
pub(crate) fn is_there() -> bool {
    // SAFETY: opens a library and closes it; that does nothing else.
    unsafe { sys::is_culib_present() }
}

/// What ranks meet by, made by one of them.
pub(crate) fn new_id() -> Option<[u8; ID_BYTES]> {
    let id = result::get_uniqueid().ok()?;
    Some(id.internal.map(|byte| byte as u8))
}

fn words(error: result::NcclError) -> String {
    format!("NCCL: {:?}", error.0)
}

impl Nccl {
    /// Waits until every rank has called it. Fails, as on two ranks that share a GPU, on all.
    pub(super) fn open(
        context: &Arc<Context>,
        id: [u8; ID_BYTES],
        rank: usize,
        n_ranks: usize,
    ) -> Result<Nccl, String> {
        context.enter();
        let driver = |error| super::words(&error);
        let stream = context.stream.context().new_stream().map_err(driver)?;
        let mut comm = std::ptr::null_mut();
        let id = sys::ncclUniqueId { internal: id.map(|byte| byte as c_char) };
        // SAFETY: writes one pointer; the context is current.
        unsafe { result::comm_init_rank(&mut comm, n_ranks as i32, id, rank as i32) }
            .map_err(words)?;
        Ok(Nccl { comm, stream, context: context.clone() })
    }

    /// Sends tensors of f32 to ranks and receives others from ranks. Between two ranks the order of
    /// one's sends is the order of the other's receives.
    pub(crate) fn exchange(
        &self,
        sends: &[(usize, &Tensor)],
        receives: &mut [(usize, &mut Tensor)],
    ) -> Result<(), String> {
        self.context.enter();
        let driver = |error| super::words(&error);
        self.stream.join(&self.context.stream).map_err(driver)?;
        let stream = self.stream.cu_stream().cast();
        let kind = sys::ncclDataType_t::ncclFloat32;
        result::group_start().map_err(words)?;
        for (peer, x) in sends {
            let (at, n) = (x.cuda_address() as *const _, x.n_elem());
            // SAFETY: the tensor has so many numbers, and its giver keeps it until `join`.
            unsafe { result::send(at, n, kind, *peer as i32, self.comm, stream) }.map_err(words)?;
        }
        for (peer, x) in receives {
            let (at, n) = (x.cuda_address() as *mut _, x.n_elem());
            // SAFETY: as above; nobody else has it.
            unsafe { result::recv(at, n, kind, *peer as i32, self.comm, stream) }.map_err(words)?;
        }
        result::group_end().map_err(words)?;
        Ok(())
    }

    /// What the device is given from now on waits for all messages before.
    pub(crate) fn join(&self) -> Result<(), String> {
        self.context.enter();
        self.context.stream.join(&self.stream).map_err(|error| super::words(&error))
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        self.context.enter();
        // SAFETY: it was opened once. Aborting waits for no other rank.
        let _ = unsafe { result::comm_abort(self.comm) };
    }
}
