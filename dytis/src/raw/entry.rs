//! Safe handles on one place of a map: entries and cursors.

use super::RawMap;
use super::edge::Place;
use core::marker::PhantomData;
use core::ptr::NonNull;

impl<V> RawMap<V> {
    #[inline]
    pub(crate) fn get(&self, bits: u64) -> Option<&V> {
        // SAFETY: the value of a live pair, borrowed with the map.
        self.find(bits).map(|value| unsafe { value.as_ref() })
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, bits: u64) -> Option<&mut V> {
        // SAFETY: the value of a live pair, borrowed exclusively with the map.
        self.find(bits).map(|mut value| unsafe { value.as_mut() })
    }

    pub(crate) fn get_many<'a>(&'a self, bits: impl Fn(usize) -> u64, out: &mut [Option<&'a V>]) {
        let mut found = [core::ptr::null_mut(); 64];
        for (chunk, out) in out.chunks_mut(found.len()).enumerate() {
            let start = chunk * found.len();
            self.find_many(|i| bits(start + i), &mut found[..out.len()]);
            for (out, &value) in out.iter_mut().zip(&found) {
                // SAFETY: null, or the value of a live pair.
                *out = unsafe { NonNull::new(value).map(|value| value.as_ref()) };
            }
        }
    }

    /// The pair or gap at `bits`.
    #[inline]
    pub(crate) fn entry(&mut self, bits: u64) -> Result<Occupied<'_, V>, Vacant<'_, V>> {
        if self.len == 0 {
            return Err(Vacant {
                map: self,
                gap: Place::end(),
                bits,
            });
        }
        let (place, found) = self.locate_to_change(bits);
        if found {
            Ok(Occupied { map: self, place })
        } else {
            Err(Vacant {
                map: self,
                gap: place,
                bits,
            })
        }
    }

    pub(crate) fn first_occupied(&mut self) -> Option<Occupied<'_, V>> {
        let place = self.first();
        (!place.is_end()).then_some(Occupied { map: self, place })
    }

    pub(crate) fn last_occupied(&mut self) -> Option<Occupied<'_, V>> {
        let place = self.last();
        (!place.is_end()).then_some(Occupied { map: self, place })
    }

    /// A cursor in the gap before the first key that is at least `low` (`None`: before the first pair of all).
    pub(crate) fn cursor_from(&self, low: Option<u64>) -> RawCursor<'_, V> {
        let next = low.map_or_else(|| self.first(), |bits| self.lower_bound(bits));
        RawCursor {
            map: self,
            next,
            marker: PhantomData,
        }
    }

    /// A cursor in the gap behind the last pair.
    pub(crate) fn cursor_at_end(&self) -> RawCursor<'_, V> {
        RawCursor {
            map: self,
            next: Place::end(),
            marker: PhantomData,
        }
    }
}

/// A pair in a map borrowed exclusively.
pub(crate) struct Occupied<'a, V> {
    map: &'a mut RawMap<V>,
    place: Place<V>,
}

// SAFETY: as `&mut RawMap<V>`.
unsafe impl<V: Send> Send for Occupied<'_, V> {}
// SAFETY: as `&mut RawMap<V>`.
unsafe impl<V: Sync> Sync for Occupied<'_, V> {}

impl<'a, V> Occupied<'a, V> {
    pub(crate) fn bits(&self) -> u64 {
        // SAFETY: a pair, and the map has not changed since.
        unsafe { self.place.key() }
    }

    pub(crate) fn get(&self) -> &V {
        // SAFETY: as above.
        unsafe { &*self.place.value() }
    }

    pub(crate) fn get_mut(&mut self) -> &mut V {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { &mut *self.place.value() }
    }

    pub(crate) fn into_mut(self) -> &'a mut V {
        // SAFETY: as above; the map stays borrowed for `'a`.
        unsafe { &mut *self.place.value() }
    }

    pub(crate) fn remove(self) -> (u64, V) {
        let bits = self.bits();
        // SAFETY: a pair.
        (bits, unsafe { self.map.remove_at(self.place) })
    }
}

/// A gap in a map borrowed exclusively.
pub(crate) struct Vacant<'a, V> {
    map: &'a mut RawMap<V>,
    gap: Place<V>,
    bits: u64,
}

// SAFETY: as `&mut RawMap<V>`.
unsafe impl<V: Send> Send for Vacant<'_, V> {}
// SAFETY: as `&mut RawMap<V>`.
unsafe impl<V: Sync> Sync for Vacant<'_, V> {}

impl<'a, V> Vacant<'a, V> {
    pub(crate) fn bits(&self) -> u64 {
        self.bits
    }

    fn fill(self, value: V) -> (&'a mut RawMap<V>, *mut V) {
        let address = if self.gap.is_end() {
            self.map.insert_new(self.bits, value)
        } else {
            // SAFETY: the gap where the key belongs, and the map has not changed since.
            unsafe { self.map.insert_at(self.gap, self.bits, value) }
        };
        (self.map, address)
    }

    pub(crate) fn insert(self, value: V) -> &'a mut V {
        // SAFETY: the new pair's value; the map stays borrowed for `'a`.
        unsafe { &mut *self.fill(value).1 }
    }

    pub(crate) fn insert_occupied(self, value: V) -> Occupied<'a, V> {
        let bits = self.bits;
        let map = self.fill(value).0;
        let (place, found) = map.locate(bits);
        debug_assert!(found, "the pair was just inserted");
        Occupied { map, place }
    }
}

/// A gap between two pairs, for walking in both directions.
pub(crate) struct RawCursor<'a, V> {
    map: *const RawMap<V>,
    /// The pair behind the gap, or the end.
    next: Place<V>,
    marker: PhantomData<&'a V>,
}

// SAFETY: gives out `&V` only.
unsafe impl<V: Sync> Send for RawCursor<'_, V> {}
// SAFETY: gives out `&V` only.
unsafe impl<V: Sync> Sync for RawCursor<'_, V> {}

impl<V> Clone for RawCursor<'_, V> {
    fn clone(&self) -> Self {
        Self {
            map: self.map,
            next: self.next,
            marker: PhantomData,
        }
    }
}

impl<'a, V> RawCursor<'a, V> {
    fn before(&self) -> Option<Place<V>> {
        // SAFETY: the map lives for `'a`, and `next` is a pair of it or the end.
        let place = unsafe { (*self.map).before(self.next) };
        (!place.is_end()).then_some(place)
    }

    pub(crate) fn peek_next(&self) -> Option<(u64, &'a V)> {
        // SAFETY: a pair of a map borrowed for `'a`.
        (!self.next.is_end()).then(|| unsafe { (self.next.key(), &*self.next.value()) })
    }

    pub(crate) fn peek_prev(&self) -> Option<(u64, &'a V)> {
        // SAFETY: a pair of a map borrowed for `'a`.
        self.before()
            .map(|place| unsafe { (place.key(), &*place.value()) })
    }

    pub(crate) fn next(&mut self) -> Option<(u64, &'a V)> {
        let pair = self.peek_next()?;
        // SAFETY: `next` is a pair, as was just seen.
        self.next = unsafe { (*self.map).after(self.next) };
        Some(pair)
    }

    pub(crate) fn prev(&mut self) -> Option<(u64, &'a V)> {
        let pair = self.peek_prev()?;
        self.next = self.before()?;
        Some(pair)
    }
}
