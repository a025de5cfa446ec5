//! Reproducible initial weights.

use std::cell::Cell;
use std::sync::{Mutex, PoisonError};

use burn::tensor::Device;

/// Runs `make` with Burn's generator seeded. There is one generator per device and process, and layers draw their weights when they are first looked at:
/// `make` must look at all of them. Threads take turns; `make` may come back here for parts of a model, which are seeded by themselves.
pub(crate) fn with_seed<T>(device: &Device, seed: u64, make: impl FnOnce() -> T) -> T {
    static TURN: Mutex<()> = Mutex::new(());
    thread_local! {
        static MINE: Cell<bool> = const { Cell::new(false) };
    }
    /// Ends this thread's turn, also when `make` panics.
    struct End;
    impl Drop for End {
        fn drop(&mut self) {
            MINE.set(false);
        }
    }
    if MINE.get() {
        device.seed(seed);
        return make();
    }
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    MINE.set(true);
    let _end = End;
    device.seed(seed);
    make()
}
