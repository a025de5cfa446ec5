//! A rank's communication thread: all-reduces buckets while the rank goes on.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::Error;
use crate::communicator::Communicator;

/// A bucket after its all-reduce.
pub(super) struct Reduced {
    pub(super) bucket: usize,
    pub(super) values: Vec<f32>,
    pub(super) start: Instant,
    pub(super) duration: Duration,
}

/// A thread with a communicator of its own, which reduces buckets in the order in which it gets them.
pub(super) struct Reducer {
    work: Option<Sender<(usize, Vec<f32>)>>,
    results: Receiver<Result<Reduced, Error>>,
    thread: Option<JoinHandle<()>>,
    /// Buffers that travel back and forth.
    spare: Vec<Vec<f32>>,
    under_way: usize,
}

impl Reducer {
    /// Splits a communicator off for the thread; every rank does so at the same point.
    pub(super) fn start(communicator: &dyn Communicator) -> Result<Self, Error> {
        let rank = communicator.rank();
        let own = communicator.split(0, rank)?;
        let (work, inbox) = channel::<(usize, Vec<f32>)>();
        let (sender, results) = channel();
        let thread = std::thread::Builder::new()
            .name(format!("iidp-r{rank}-comm"))
            .spawn(move || {
                while let Ok((bucket, mut values)) = inbox.recv() {
                    let start = Instant::now();
                    let reduced = own.all_reduce_sum(&mut values).map(|()| Reduced {
                        bucket,
                        values,
                        start,
                        duration: start.elapsed(),
                    });
                    if sender.send(reduced).is_err() {
                        return;
                    }
                }
            })
            .map_err(|error| Error::ThreadStart {
                what: "communication",
                rank,
                reason: error.to_string(),
            })?;
        Ok(Self {
            work: Some(work),
            results,
            thread: Some(thread),
            spare: Vec::new(),
            under_way: 0,
        })
    }

    /// Queues a copy of a bucket.
    pub(super) fn submit(&mut self, bucket: usize, values: &[f32]) {
        let mut buffer = self.spare.pop().unwrap_or_default();
        buffer.clear();
        buffer.extend_from_slice(values);
        // A thread that has ended shows when its results are collected.
        if self
            .work
            .as_ref()
            .is_some_and(|work| work.send((bucket, buffer)).is_ok())
        {
            self.under_way += 1;
        }
    }

    /// Waits for all buckets that were queued, handing each on; stops at the first error.
    pub(super) fn collect(
        &mut self,
        rank: usize,
        mut hand_on: impl FnMut(&Reduced),
    ) -> Result<(), Error> {
        while self.under_way > 0 {
            self.under_way -= 1;
            let reduced = self
                .results
                .recv()
                .map_err(|_| Error::RankGone { rank })??;
            hand_on(&reduced);
            self.spare.push(reduced.values);
        }
        Ok(())
    }
}

impl Drop for Reducer {
    fn drop(&mut self) {
        self.work = None;
        if let Some(thread) = self.thread.take() {
            // The thread ends with its last collective, which a time-out bounds.
            let _ = thread.join();
        }
    }
}
