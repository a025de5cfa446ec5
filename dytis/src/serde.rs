//! A map as a map, and a set as a sequence, in any format of serde.
//!
//! Reading takes pairs in any order; of a key that comes twice the last value stays, as it does in std's maps.

use crate::{DytisMap, DytisSet, Key};
use core::fmt;
use core::marker::PhantomData;
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::ser::{Serialize, Serializer};

impl<K: Key + Serialize, V: Serialize> Serialize for DytisMap<K, V> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self)
    }
}

impl<'de, K: Key + Deserialize<'de>, V: Deserialize<'de>> Deserialize<'de> for DytisMap<K, V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs<K, V>(PhantomData<(K, V)>);

        impl<'de, K: Key + Deserialize<'de>, V: Deserialize<'de>> Visitor<'de> for Pairs<K, V> {
            type Value = DytisMap<K, V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
                let mut map = DytisMap::new();
                while let Some(pair) = access.next_entry()? {
                    map.extend([pair]);
                }
                Ok(map)
            }
        }

        deserializer.deserialize_map(Pairs(PhantomData))
    }
}

impl<K: Key + Serialize> Serialize for DytisSet<K> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self)
    }
}

impl<'de, K: Key + Deserialize<'de>> Deserialize<'de> for DytisSet<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Keys<K>(PhantomData<K>);

        impl<'de, K: Key + Deserialize<'de>> Visitor<'de> for Keys<K> {
            type Value = DytisSet<K>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a sequence")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
                let mut set = DytisSet::new();
                while let Some(key) = access.next_element()? {
                    set.insert(key);
                }
                Ok(set)
            }
        }

        deserializer.deserialize_seq(Keys(PhantomData))
    }
}
