//! Dropping a map, and taking it apart pair by pair, both safe against values whose `Drop` panics.

use super::RawMap;
use super::directory::Slot;
use super::edge::Place;
use alloc::boxed::Box;
use core::ptr;

impl<V> RawMap<V> {
    /// Frees segments and directories, and forgets the values.
    fn free_structure(&mut self) {
        // SAFETY: each directory is reached once over its slot, each segment once over the chain, and none is used again.
        unsafe {
            self.root.free_directories();
            let mut segment = self.head;
            while !segment.is_null() {
                segment = Box::from_raw(segment).next;
            }
        }
        self.root = Slot::EMPTY;
        (self.head, self.tail) = (ptr::null_mut(), ptr::null_mut());
        self.len = 0;
    }
}

impl<V> Drop for RawMap<V> {
    fn drop(&mut self) {
        /// Goes on with the next bucket, and frees the structure at last, also while a panic is under way.
        struct Rest<'a, V>(&'a mut RawMap<V>, Place<V>);

        impl<V> Rest<'_, V> {
            fn drop_values(&mut self) {
                while !self.1.is_end() {
                    let place = self.1;
                    // SAFETY: the bucket is live and its first `len` values are initialised; it is not visited again.
                    unsafe {
                        let len = (*place.segment).len(place.number);
                        self.1 = self.0.next_bucket(place);
                        ptr::slice_from_raw_parts_mut(place.bucket.values(), len).drop_in_place();
                    }
                }
            }
        }

        impl<V> Drop for Rest<'_, V> {
            fn drop(&mut self) {
                self.drop_values();
                self.0.free_structure();
            }
        }

        let first = if core::mem::needs_drop::<V>() {
            self.first()
        } else {
            Place::end()
        };
        let mut rest = Rest(self, first);
        rest.drop_values();
    }
}

/// A map that is being taken apart from both ends.
pub(crate) struct Drain<V> {
    map: core::mem::ManuallyDrop<RawMap<V>>,
    /// The next pair at the front.
    front: Place<V>,
    /// The last pair at the back.
    back: Place<V>,
    left: usize,
}

// SAFETY: owns the map and its values, like `RawMap`.
unsafe impl<V: Send> Send for Drain<V> {}
// SAFETY: `&Drain` gives access to `&V` at most.
unsafe impl<V: Sync> Sync for Drain<V> {}

impl<V> Drain<V> {
    pub(crate) fn new(map: RawMap<V>) -> Self {
        let (front, back, left) = (map.first(), map.last(), map.len());
        Self {
            map: core::mem::ManuallyDrop::new(map),
            front,
            back,
            left,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.left
    }

    pub(crate) fn next(&mut self) -> Option<(u64, V)> {
        if self.left == 0 {
            return None;
        }
        self.left -= 1;
        // SAFETY: `left` pairs have not been taken, the first of them at `front`.
        unsafe {
            let pair = (self.front.key(), self.front.value().read());
            self.front = self.map.after(self.front);
            Some(pair)
        }
    }

    pub(crate) fn next_back(&mut self) -> Option<(u64, V)> {
        if self.left == 0 {
            return None;
        }
        self.left -= 1;
        // SAFETY: `left` pairs have not been taken, the last of them at `back`.
        unsafe {
            let pair = (self.back.key(), self.back.value().read());
            if self.left > 0 {
                self.back = self.map.before(self.back);
            }
            Some(pair)
        }
    }

    /// The pairs that are left, in order.
    pub(crate) fn remaining(&self) -> super::walk::Walk<'_, V> {
        super::walk::Walk::new(&self.map, self.front, self.back, self.left)
    }
}

impl<V> Drop for Drain<V> {
    fn drop(&mut self) {
        /// Drops what is left, and frees the structure at last, also while a panic is under way.
        struct Rest<'a, V>(&'a mut Drain<V>);

        impl<V> Drop for Rest<'_, V> {
            fn drop(&mut self) {
                while let Some(pair) = self.0.next() {
                    drop(pair);
                }
                self.0.map.free_structure();
                // SAFETY: the pool's memory is freed once; the values have been moved out.
                unsafe { ptr::drop_in_place(&raw mut self.0.map.pool) };
            }
        }

        let rest = Rest(self);
        if core::mem::needs_drop::<V>() {
            while let Some(pair) = rest.0.next() {
                drop(pair);
            }
        } else {
            rest.0.left = 0;
        }
    }
}
