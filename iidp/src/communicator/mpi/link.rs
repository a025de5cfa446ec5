//! Point-to-point transfers of bytes that can be given up.
//!
//! MPI owns a buffer from the start of a transfer to its completion, which a dead partner may put off for ever. Every transfer has therefore a buffer of its own on the
//! heap, and one that is given up leaks it: MPI may go on writing to it, and nothing else ever will.

#![allow(
    unsafe_code,
    reason = "MPI keeps pointers to buffers beyond the call, which safe borrows cannot express"
)]

use std::{fmt, mem};

use ::mpi::datatype::Equivalence as _;
use ::mpi::request::{Request, StaticScope};
use ::mpi::topology::{Color, Communicator as _, SimpleCommunicator};
use ::mpi::traits::{Destination as _, Source as _};

/// An MPI communicator that any thread may use.
pub(super) struct Link(SimpleCommunicator);

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Link({} of {})", self.rank(), self.size())
    }
}

// SAFETY: an MPI communicator is a handle to a process-wide object. MPI is initialised with `MPI_THREAD_MULTIPLE` (`World::start` insists on it), under which all
// calls made here may be made from any thread at any time.
unsafe impl Send for Link {}
// SAFETY: as above.
unsafe impl Sync for Link {}

impl Link {
    pub(super) fn new(communicator: SimpleCommunicator) -> Self {
        Self(communicator)
    }

    pub(super) fn duplicate(&self) -> Self {
        Self(self.0.duplicate())
    }

    pub(super) fn rank(&self) -> usize {
        self.0.rank() as usize
    }

    pub(super) fn size(&self) -> usize {
        self.0.size() as usize
    }

    /// Starts sending `bytes`.
    pub(super) fn send(&self, to: usize, tag: i32, bytes: Box<[u8]>) -> Transfer {
        let buffer = Box::into_raw(bytes);
        // SAFETY: the box was given up above, so the pointer is valid until `Transfer` frees it, which it does only when the request is complete; MPI only reads, and
        // nobody writes in between.
        let borrowed: &'static [u8] = unsafe { &*buffer };
        let request =
            self.0
                .process_at_rank(to as i32)
                .immediate_send_with_tag(StaticScope, borrowed, tag);
        Transfer {
            request: Some(request),
            buffer,
        }
    }

    /// Starts receiving exactly as many bytes as the buffer has.
    pub(super) fn receive(&self, from: usize, tag: i32, buffer: Box<[u8]>) -> Transfer {
        let buffer = Box::into_raw(buffer);
        // SAFETY: as in `send`; the pointer is unique, and nobody reads or writes through it until the request is complete.
        let borrowed: &'static mut [u8] = unsafe { &mut *buffer };
        let request = self
            .0
            .process_at_rank(from as i32)
            .immediate_receive_into_with_tag(StaticScope, borrowed, tag);
        Transfer {
            request: Some(request),
            buffer,
        }
    }

    /// Sender and length of a message that waits here, from `from` or anybody.
    pub(super) fn probe(&self, from: Option<usize>, tag: i32) -> Option<(usize, usize)> {
        let status = match from {
            Some(from) => self
                .0
                .process_at_rank(from as i32)
                .immediate_probe_with_tag(tag),
            None => self.0.any_process().immediate_probe_with_tag(tag),
        }?;
        Some((
            status.source_rank() as usize,
            status.count(u8::equivalent_datatype()) as usize,
        ))
    }

    /// Splits the communicator. All ranks have to be about to call it: this waits for them without limit.
    pub(super) fn split(&self, color: usize, key: usize) -> Option<Self> {
        self.0
            .split_by_color_with_key(Color::with_value(color as i32), key as i32)
            .map(Self)
    }
}

/// A transfer on its way.
#[derive(Debug)]
pub(super) struct Transfer {
    /// None once it is complete.
    request: Option<Request<'static, [u8]>>,
    buffer: *mut [u8],
}

// SAFETY: the buffer belongs to the transfer alone, and requests may be completed by any thread under `MPI_THREAD_MULTIPLE`.
unsafe impl Send for Transfer {}

impl Transfer {
    /// Whether the transfer is complete. Never waits.
    pub(super) fn poll(&mut self) -> bool {
        if let Some(request) = self.request.take() {
            self.request = request.test().err();
        }
        self.request.is_none()
    }

    /// The buffer of a complete transfer.
    pub(super) fn into_buffer(mut self) -> Option<Box<[u8]>> {
        if !self.poll() {
            return None;
        }
        let buffer = self.buffer;
        mem::forget(self);
        // SAFETY: the pointer came from `Box::into_raw`, the request that used it is complete, and `self`, which would free it, is gone.
        Some(unsafe { Box::from_raw(buffer) })
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        match self.request.take() {
            // A request must not be dropped before it is complete; its buffer stays MPI's.
            Some(request) => mem::forget(request),
            // SAFETY: the pointer came from `Box::into_raw` and the request that used it is complete.
            None => drop(unsafe { Box::from_raw(self.buffer) }),
        }
    }
}
