//! The locks and atomics of the concurrent map, in one place so that the model test can run the same
//! source on a scheduler of its own.

pub(crate) use std::sync::atomic::AtomicUsize;
pub(crate) use std::sync::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
