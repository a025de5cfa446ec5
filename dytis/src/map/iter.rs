//! Iterators over a whole map.

use crate::Key;
use crate::raw::drain::Drain;
use crate::raw::walk::{Walk, WalkMut};
use core::fmt;
use core::iter::FusedIterator;
use core::marker::PhantomData;

/// Iterator over the pairs of a map; from [`DytisMap::iter`](crate::DytisMap::iter).
pub struct Iter<'a, K, V> {
    walk: Walk<'a, V>,
    left: usize,
    marker: PhantomData<K>,
}

impl<'a, K, V> Iter<'a, K, V> {
    pub(super) fn new(walk: Walk<'a, V>, left: usize) -> Self {
        Self {
            walk,
            left,
            marker: PhantomData,
        }
    }
}

impl<K, V> Clone for Iter<'_, K, V> {
    fn clone(&self) -> Self {
        Self::new(self.walk.clone(), self.left)
    }
}

/// Iterator over the pairs of a map, with values to change; from [`DytisMap::iter_mut`](crate::DytisMap::iter_mut).
pub struct IterMut<'a, K, V> {
    walk: WalkMut<'a, V>,
    left: usize,
    marker: PhantomData<K>,
}

impl<'a, K, V> IterMut<'a, K, V> {
    pub(super) fn new(walk: WalkMut<'a, V>, left: usize) -> Self {
        Self {
            walk,
            left,
            marker: PhantomData,
        }
    }

    /// The pairs not yet yielded, to look at.
    pub(crate) fn remaining(&self) -> Iter<'_, K, V> {
        Iter::new(self.walk.remaining(), self.left)
    }
}

/// Iterator over the pairs of a map taken apart; from its `into_iter`.
pub struct IntoIter<K, V> {
    drain: Drain<V>,
    marker: PhantomData<K>,
}

impl<K, V> IntoIter<K, V> {
    pub(super) fn new(drain: Drain<V>) -> Self {
        Self {
            drain,
            marker: PhantomData,
        }
    }

    /// The pairs not yet yielded, to look at.
    pub(crate) fn remaining(&self) -> Iter<'_, K, V> {
        Iter::new(self.drain.remaining(), self.drain.len())
    }
}

/// The methods of `Iterator` that are quicker than the default ones for pairs that come in the order of their keys, one each:
/// both ends are a step away, and a fold goes bucket by bucket.
macro_rules! in_key_order {
    () => {
        fn last(mut self) -> Option<Self::Item> {
            self.next_back()
        }

        fn min(mut self) -> Option<Self::Item>
        where
            Self::Item: Ord,
        {
            self.next()
        }

        fn max(mut self) -> Option<Self::Item>
        where
            Self::Item: Ord,
        {
            self.next_back()
        }

        #[inline]
        fn fold<B, F: FnMut(B, Self::Item) -> B>(self, init: B, mut f: F) -> B {
            let mut state = Some(init);
            self.walk.visit(|bits, value| {
                state = state
                    .take()
                    .map(|state| f(state, (K::from_bits(bits), value)));
                true
            });
            state.expect("every visit puts the state back")
        }
    };
}
pub(super) use in_key_order;

macro_rules! walks {
    ($($name:ident $item:ty),*) => {$(
        impl<'a, K: Key, V> Iterator for $name<'a, K, V> {
            type Item = (K, $item);

            #[inline]
            fn next(&mut self) -> Option<Self::Item> {
                let (bits, value) = self.walk.next()?;
                self.left -= 1;
                Some((K::from_bits(bits), value))
            }

            #[inline]
            fn size_hint(&self) -> (usize, Option<usize>) {
                (self.left, Some(self.left))
            }

            in_key_order!();
        }

        impl<K: Key, V> DoubleEndedIterator for $name<'_, K, V> {
            #[inline]
            fn next_back(&mut self) -> Option<Self::Item> {
                let (bits, value) = self.walk.next_back()?;
                self.left -= 1;
                Some((K::from_bits(bits), value))
            }
        }

        impl<K: Key, V> ExactSizeIterator for $name<'_, K, V> {}
        impl<K: Key, V> FusedIterator for $name<'_, K, V> {}
    )*};
}

walks!(Iter & 'a V, IterMut & 'a mut V);

impl<K: Key, V> Iterator for IntoIter<K, V> {
    type Item = (K, V);

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        self.drain
            .next()
            .map(|(bits, value)| (K::from_bits(bits), value))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.drain.len(), Some(self.drain.len()))
    }
}

impl<K: Key, V> DoubleEndedIterator for IntoIter<K, V> {
    #[inline]
    fn next_back(&mut self) -> Option<Self::Item> {
        self.drain
            .next_back()
            .map(|(bits, value)| (K::from_bits(bits), value))
    }
}

impl<K: Key, V> ExactSizeIterator for IntoIter<K, V> {}
impl<K: Key, V> FusedIterator for IntoIter<K, V> {}

impl<K: Key + fmt::Debug, V: fmt::Debug> fmt::Debug for Iter<'_, K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.clone()).finish()
    }
}

impl<K: Key + fmt::Debug, V: fmt::Debug> fmt::Debug for IterMut<'_, K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.remaining().fmt(f)
    }
}

impl<K: Key + fmt::Debug, V: fmt::Debug> fmt::Debug for IntoIter<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.remaining().fmt(f)
    }
}

/// One half of the pairs of another iterator.
macro_rules! halves {
    ($(
        $(#[$doc:meta])*
        $name:ident [$($life:lifetime)?] over $inner:ty, yields $item:ty = $half:tt, looks by $remaining:expr;
    )*) => {$(
        $(#[$doc])*
        pub struct $name<$($life,)? K, V> {
            inner: $inner,
        }

        impl<$($life,)? K, V> $name<$($life,)? K, V> {
            pub(super) fn new(inner: $inner) -> Self {
                Self { inner }
            }
        }

        impl<$($life,)? K: Key, V> Iterator for $name<$($life,)? K, V> {
            type Item = $item;

            #[inline]
            fn next(&mut self) -> Option<Self::Item> {
                self.inner.next().map(|pair| pair.$half)
            }

            #[inline]
            fn size_hint(&self) -> (usize, Option<usize>) {
                self.inner.size_hint()
            }

            fn last(mut self) -> Option<Self::Item> {
                self.next_back()
            }

            #[inline]
            fn fold<B, F: FnMut(B, Self::Item) -> B>(self, init: B, mut f: F) -> B {
                self.inner.fold(init, |state, pair| f(state, pair.$half))
            }
        }

        impl<$($life,)? K: Key, V> DoubleEndedIterator for $name<$($life,)? K, V> {
            #[inline]
            fn next_back(&mut self) -> Option<Self::Item> {
                self.inner.next_back().map(|pair| pair.$half)
            }
        }

        impl<$($life,)? K: Key, V> ExactSizeIterator for $name<$($life,)? K, V> {}
        impl<$($life,)? K: Key, V> FusedIterator for $name<$($life,)? K, V> {}

        impl<$($life,)? K: Key + fmt::Debug, V: fmt::Debug> fmt::Debug for $name<$($life,)? K, V> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let remaining: fn(&Self) -> Iter<'_, K, V> = $remaining;
                f.debug_list().entries(remaining(self).map(|pair| pair.$half)).finish()
            }
        }
    )*};
}

halves! {
    /// Iterator over the keys of a map; from [`DytisMap::keys`](crate::DytisMap::keys).
    Keys ['a] over Iter<'a, K, V>, yields K = 0, looks by |it| it.inner.clone();
    /// Iterator over the values of a map; from [`DytisMap::values`](crate::DytisMap::values).
    Values ['a] over Iter<'a, K, V>, yields &'a V = 1, looks by |it| it.inner.clone();
    /// Iterator over the values of a map, to change; from [`DytisMap::values_mut`](crate::DytisMap::values_mut).
    ValuesMut ['a] over IterMut<'a, K, V>, yields &'a mut V = 1, looks by |it| it.inner.remaining();
    /// Iterator over the keys of a map taken apart; from [`DytisMap::into_keys`](crate::DytisMap::into_keys).
    IntoKeys [] over IntoIter<K, V>, yields K = 0, looks by |it| it.inner.remaining();
    /// Iterator over the values of a map taken apart; from [`DytisMap::into_values`](crate::DytisMap::into_values).
    IntoValues [] over IntoIter<K, V>, yields V = 1, looks by |it| it.inner.remaining();
}

impl<K, V> Clone for Keys<'_, K, V> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
        }
    }
}

impl<K, V> Clone for Values<'_, K, V> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
        }
    }
}
