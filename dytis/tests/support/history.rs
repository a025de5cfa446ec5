//! Recorded histories of calls on one key, and whether they are linearisable.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "each of the programs that include this file uses a part of it"
)]

use std::collections::HashSet;

use super::streams::Rng;

/// One recorded call on one key: what was asked, what came back, and when, by a shared clock.
#[derive(Debug, Clone, Copy)]
pub struct Event {
    pub call: Call,
    pub result: Option<u64>,
    pub start: u64,
    pub end: u64,
}

#[derive(Debug, Clone, Copy)]
pub enum Call {
    Get,
    Insert(u64),
    Remove,
    /// Adds to a present value.
    Update(u64),
    /// Removes what is there, inserts what is not.
    Toggle(u64),
    GetOrInsert(u64),
}

impl Call {
    /// Any of the calls; `fresh` is a value that no other call brings.
    pub fn random(rng: &mut Rng, fresh: u64) -> Self {
        match rng.below(6) {
            0 => Self::Get,
            1 => Self::Insert(fresh),
            2 => Self::Remove,
            3 => Self::Update(fresh),
            4 => Self::Toggle(fresh),
            _ => Self::GetOrInsert(fresh),
        }
    }

    /// What a sequential map returns and holds afterwards.
    pub fn apply(self, old: Option<u64>) -> (Option<u64>, Option<u64>) {
        match self {
            Self::Get => (old, old),
            Self::Insert(value) => (old, Some(value)),
            Self::Remove => (old, None),
            Self::Update(add) => (old, old.map(|value| value + add)),
            Self::Toggle(value) => (old, if old.is_some() { None } else { Some(value) }),
            Self::GetOrInsert(value) => (old.or(Some(value)), old.or(Some(value))),
        }
    }
}

/// Whether some order of the events explains all results: each event between its start and its
/// end, one at a time (Wing and Gong 1993). The state of the search is how far each thread is and
/// the value; linearisability is local, so that each key is checked alone (Herlihy and Wing 1990).
pub fn linearisable(threads: &[Vec<Event>]) -> bool {
    let mut seen = HashSet::new();
    let mut open = vec![(vec![0_usize; threads.len()], None)];
    while let Some((done, value)) = open.pop() {
        let next = |thread: usize| threads[thread].get(done[thread]);
        // An event may come next if no other pending event ended before it started.
        let Some(first_end) = (0..threads.len())
            .filter_map(next)
            .map(|event| event.end)
            .min()
        else {
            return true;
        };
        for thread in 0..threads.len() {
            let Some(event) = next(thread).filter(|event| event.start < first_end) else {
                continue;
            };
            let (result, after) = event.call.apply(value);
            if result == event.result {
                let mut done = done.clone();
                done[thread] += 1;
                if seen.insert((done.clone(), after)) {
                    open.push((done, after));
                }
            }
        }
    }
    false
}
