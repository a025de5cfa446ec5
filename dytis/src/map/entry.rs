//! Entries: the place of one key.

use crate::Key;
use crate::raw::entry::{Occupied, Vacant};
use core::fmt;
use core::marker::PhantomData;
use core::mem;

/// The place of a key, occupied or vacant; from [`DytisMap::entry`](crate::DytisMap::entry).
pub enum Entry<'a, K, V> {
    /// The key is there.
    Occupied(OccupiedEntry<'a, K, V>),
    /// The key is not there.
    Vacant(VacantEntry<'a, K, V>),
}

/// The place of a key that is there.
pub struct OccupiedEntry<'a, K, V> {
    raw: Occupied<'a, V>,
    marker: PhantomData<K>,
}

/// The place where a key that is not there belongs.
pub struct VacantEntry<'a, K, V> {
    raw: Vacant<'a, V>,
    marker: PhantomData<K>,
}

impl<'a, K: Key, V> Entry<'a, K, V> {
    /// The value, after inserting `default` if there was none.
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// let mut map = DytisMap::new();
    /// *map.entry(1_u64).or_insert(10) += 1;
    /// assert_eq!(map[&1], 11);
    /// ```
    pub fn or_insert(self, default: V) -> &'a mut V {
        self.or_insert_with(|| default)
    }

    /// The value, after inserting what `default` computes if there was none.
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// let mut map = DytisMap::new();
    /// map.entry(1_u64).or_insert_with(Vec::new).push('a');
    /// assert_eq!(map[&1], ['a']);
    /// ```
    pub fn or_insert_with<F: FnOnce() -> V>(self, default: F) -> &'a mut V {
        match self {
            Self::Occupied(entry) => entry.into_mut(),
            Self::Vacant(entry) => entry.insert(default()),
        }
    }

    /// The value, after inserting what `default` computes from the key if there was none.
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// let mut map = DytisMap::new();
    /// assert_eq!(*map.entry(3_u64).or_insert_with_key(|key| key * 2), 6);
    /// ```
    pub fn or_insert_with_key<F: FnOnce(&K) -> V>(self, default: F) -> &'a mut V {
        match self {
            Self::Occupied(entry) => entry.into_mut(),
            Self::Vacant(entry) => {
                let value = default(&entry.key());
                entry.insert(value)
            }
        }
    }

    /// The value, after inserting the default one if there was none.
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// let mut map: DytisMap<u64, String> = DytisMap::new();
    /// map.entry(3).or_default().push('x');
    /// assert_eq!(map[&3], "x");
    /// ```
    pub fn or_default(self) -> &'a mut V
    where
        V: Default,
    {
        self.or_insert_with(V::default)
    }

    /// The key.
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// assert_eq!(DytisMap::<u64, ()>::new().entry(3).key(), 3);
    /// ```
    pub fn key(&self) -> K {
        match self {
            Self::Occupied(entry) => entry.key(),
            Self::Vacant(entry) => entry.key(),
        }
    }

    /// Changes the value if there is one.
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// let mut map = DytisMap::from([(1_u64, 1)]);
    /// map.entry(1).and_modify(|value| *value += 1).or_insert(0);
    /// assert_eq!(map[&1], 2);
    /// ```
    #[must_use = "an entry does nothing by itself"]
    pub fn and_modify<F: FnOnce(&mut V)>(mut self, change: F) -> Self {
        if let Self::Occupied(entry) = &mut self {
            change(entry.get_mut());
        }
        self
    }

    /// Sets the value and returns the entry, which is occupied now.
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// let mut map = DytisMap::new();
    /// assert_eq!(map.entry(1_u64).insert_entry('a').get(), &'a');
    /// ```
    pub fn insert_entry(self, value: V) -> OccupiedEntry<'a, K, V> {
        match self {
            Self::Occupied(mut entry) => {
                entry.insert(value);
                entry
            }
            Self::Vacant(entry) => entry.insert_entry(value),
        }
    }
}

impl<'a, K: Key, V> OccupiedEntry<'a, K, V> {
    pub(super) fn new(raw: Occupied<'a, V>) -> Self {
        Self {
            raw,
            marker: PhantomData,
        }
    }

    /// The key.
    pub fn key(&self) -> K {
        K::from_bits(self.raw.bits())
    }

    /// The value.
    pub fn get(&self) -> &V {
        self.raw.get()
    }

    /// The value, to change as long as the entry lives.
    pub fn get_mut(&mut self) -> &mut V {
        self.raw.get_mut()
    }

    /// The value, to change as long as the map is borrowed.
    pub fn into_mut(self) -> &'a mut V {
        self.raw.into_mut()
    }

    /// Sets the value and returns the old one.
    pub fn insert(&mut self, value: V) -> V {
        mem::replace(self.get_mut(), value)
    }

    /// Removes the pair and returns the value. Computes in O(1), amortised.
    pub fn remove(self) -> V {
        self.raw.remove().1
    }

    /// Removes the pair and returns it. Computes in O(1), amortised.
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// let mut map = DytisMap::from([(1_u64, 'a')]);
    /// assert_eq!(map.first_entry().unwrap().remove_entry(), (1, 'a'));
    /// assert!(map.is_empty());
    /// ```
    pub fn remove_entry(self) -> (K, V) {
        let (bits, value) = self.raw.remove();
        (K::from_bits(bits), value)
    }
}

impl<'a, K: Key, V> VacantEntry<'a, K, V> {
    pub(super) fn new(raw: Vacant<'a, V>) -> Self {
        Self {
            raw,
            marker: PhantomData,
        }
    }

    /// The key.
    pub fn key(&self) -> K {
        K::from_bits(self.raw.bits())
    }

    /// The key; as [`key`](Self::key), named as in std.
    pub fn into_key(self) -> K {
        self.key()
    }

    /// Inserts the pair and returns the value's place. Computes in O(1), amortised.
    pub fn insert(self, value: V) -> &'a mut V {
        self.raw.insert(value)
    }

    /// Inserts the pair and returns its entry.
    pub fn insert_entry(self, value: V) -> OccupiedEntry<'a, K, V> {
        OccupiedEntry::new(self.raw.insert_occupied(value))
    }
}

impl<K: Key + fmt::Debug, V: fmt::Debug> fmt::Debug for Entry<'_, K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Occupied(entry) => f.debug_tuple("Entry").field(entry).finish(),
            Self::Vacant(entry) => f.debug_tuple("Entry").field(entry).finish(),
        }
    }
}

impl<K: Key + fmt::Debug, V: fmt::Debug> fmt::Debug for OccupiedEntry<'_, K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OccupiedEntry")
            .field("key", &self.key())
            .field("value", self.get())
            .finish()
    }
}

impl<K: Key + fmt::Debug, V> fmt::Debug for VacantEntry<'_, K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("VacantEntry").field(&self.key()).finish()
    }
}
