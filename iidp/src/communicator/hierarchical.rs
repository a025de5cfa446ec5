//! Two levels: ranks that share a machine, and one leader per machine that speaks for it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::{Communicator, LocalCommunicator, group_of_color, shard_range};
use crate::error::Error;

/// A rank in a group of groups: threads inside each process, processes across.
///
/// Ranks are numbered process by process, in thread order within each. A sum is taken inside each process first, in thread order, then across in process order: as
/// reproducible as any other, but not in the bits of a flat group. Only the leader (thread 0) of a process uses the network, once per collective, so that a
/// message crosses it once per process and not once per rank.
///
/// Point-to-point messages travel inside a process; there are none between processes.
///
/// # Examples
///
/// ```
/// use std::{thread, time::Duration};
/// use iidp::communicator::{Communicator, HierarchicalCommunicator, LocalCommunicator};
///
/// // Two machines, here threads too, of two and three ranks.
/// let timeout = Duration::from_secs(5);
/// let machines: Vec<_> = LocalCommunicator::group(2, timeout)?
///     .into_iter()
///     .map(|across| {
///         thread::spawn(move || {
///             let threads = 2 + across.rank();
///             let ranks = HierarchicalCommunicator::group(Box::new(across), threads, timeout)?;
///             let sums = ranks.into_iter().map(|rank| {
///                 thread::spawn(move || {
///                     let mut sum = [rank.rank() as f32];
///                     rank.all_reduce_sum(&mut sum).map(|()| sum[0])
///                 })
///             });
///             let sums: Vec<_> = sums.collect();
///             sums.into_iter().map(|sum| sum.join().expect("no panic")).collect::<Result<Vec<_>, _>>()
///         })
///     })
///     .collect();
/// for machine in machines {
///     assert!(machine.join().expect("no panic")?.iter().all(|sum| *sum == 10.0));
/// }
/// # Ok::<(), iidp::Error>(())
/// ```
#[derive(Debug)]
pub struct HierarchicalCommunicator {
    inside: Box<dyn Communicator>,
    /// With the leader only.
    across: Option<Box<dyn Communicator>>,
    /// Ranks of each process, in process order.
    processes: Vec<Range<usize>>,
    process: usize,
    /// Where the leader leaves the communicators across of a split, by color.
    handed_over: Arc<Mutex<BTreeMap<usize, Box<dyn Communicator>>>>,
}

/// Tag of the messages by which the ranks inside hand their shards to the leader.
const SHARD: u64 = u64::MAX;

impl HierarchicalCommunicator {
    /// The ranks of this process: `threads` of them, which reach the other processes through `across`. Every process calls it, with any number of threads.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] when there are no threads or the time-out is zero; when the communication fails.
    pub fn group(
        across: Box<dyn Communicator>,
        threads: usize,
        timeout: Duration,
    ) -> Result<Vec<Self>, Error> {
        let inside = LocalCommunicator::group(threads, timeout)?;
        let mut start = 0;
        let processes: Vec<Range<usize>> = across
            .all_gather_bytes(&(threads as u64).to_ne_bytes())?
            .iter()
            .map(|bytes| {
                let ranks = bytes
                    .as_chunks()
                    .0
                    .first()
                    .map_or(0, |bytes| u64::from_ne_bytes(*bytes) as usize);
                start += ranks;
                start - ranks..start
            })
            .collect();
        let process = across.rank();
        let mut across = Some(across);
        let handed_over = Arc::default();
        let rank = |inside| Self {
            inside: Box::new(inside),
            across: across.take(),
            processes: processes.clone(),
            process,
            handed_over: Arc::clone(&handed_over),
        };
        Ok(inside.into_iter().map(rank).collect())
    }

    fn own(&self) -> Range<usize> {
        self.processes[self.process].clone()
    }

    /// Process and thread of a rank.
    fn place(&self, rank: usize, operation: &str) -> Result<(usize, usize), Error> {
        let process = self
            .processes
            .iter()
            .position(|ranks| ranks.contains(&rank));
        let place = process.map(|process| (process, rank - self.processes[process].start));
        place.ok_or_else(|| {
            self.fail(Error::RankOutOfRange {
                rank: self.rank(),
                got: rank,
                size: self.size(),
                operation: operation.into(),
            })
        })
    }

    /// The thread of a rank in this process.
    fn thread_here(&self, rank: usize, tag: u64, operation: &str) -> Result<usize, Error> {
        let (process, thread) = self.place(rank, operation)?;
        if process != self.process {
            let problem = format!(
                "{operation}(tag {tag}) between ranks {} and {rank}, expected ranks of one process",
                self.rank()
            );
            return Err(self.fail(Error::Invalid {
                what: "point-to-point message of a hierarchical communicator",
                problem,
            }));
        }
        Ok(thread)
    }

    /// Ends both levels.
    fn fail(&self, error: Error) -> Error {
        self.inside.abort(&error.to_string());
        if let Some(across) = &self.across {
            across.abort(&error.to_string());
        }
        error
    }

    /// Runs `body` on the leader; a failure there ends the ranks inside, and one inside ends the other processes.
    fn lead<R>(
        &self,
        body: impl FnOnce(&dyn Communicator) -> Result<R, Error>,
    ) -> Result<Option<R>, Error> {
        let Some(across) = &self.across else {
            return Ok(None);
        };
        match body(across.as_ref()) {
            Ok(result) => Ok(Some(result)),
            Err(error) => Err(self.fail(error)),
        }
    }

    /// A result of the ranks inside; its failure ends the other processes.
    fn within<R>(&self, result: Result<R, Error>) -> Result<R, Error> {
        result.inspect_err(|error| {
            if let Some(across) = &self.across {
                across.abort(&error.to_string());
            }
        })
    }
}

impl Communicator for HierarchicalCommunicator {
    fn rank(&self) -> usize {
        self.own().start + self.inside.rank()
    }

    fn size(&self) -> usize {
        self.processes.last().map_or(0, |ranks| ranks.end)
    }

    fn all_reduce_sum(&self, data: &mut [f32]) -> Result<(), Error> {
        self.within(self.inside.all_reduce_sum(data))?;
        self.lead(|across| across.all_reduce_sum(data))?;
        self.within(self.inside.broadcast(data, 0))
    }

    fn all_reduce_sum_f64(&self, data: &mut [f64]) -> Result<(), Error> {
        self.within(self.inside.all_reduce_sum_f64(data))?;
        if self
            .lead(|across| across.all_reduce_sum_f64(data))?
            .is_none()
        {
            data.fill(0.0);
        }
        // There is no broadcast of f64: the others add nothing. (-0.0 + 0.0 would lose its sign; a sum from 0.0 on is never -0.0 unless all are.)
        self.within(self.inside.all_reduce_sum_f64(data))
    }

    fn reduce_scatter_sum(&self, data: &mut [f32]) -> Result<Range<usize>, Error> {
        let range = shard_range(data.len(), self.size(), self.rank());
        let mut sum = data.to_vec();
        self.all_reduce_sum(&mut sum)?;
        data[range.clone()].copy_from_slice(&sum[range.clone()]);
        Ok(range)
    }

    fn all_gather(&self, data: &mut [f32]) -> Result<(), Error> {
        let len = data.len();
        let shard = |rank: usize| shard_range(len, self.size(), rank);
        let own = self.own();
        if self.across.is_none() {
            self.within(
                self.inside
                    .send(0, SHARD, data[shard(self.rank())].to_vec()),
            )?;
        } else {
            for thread in 1..own.len() {
                let range = shard(own.start + thread);
                let got = self.within(self.inside.recv(thread, SHARD))?;
                if got.len() != range.len() {
                    let what = format!("shard of rank {} in all_gather", own.start + thread);
                    return Err(self.fail(Error::LengthMismatch {
                        what,
                        got: got.len(),
                        expected: range.len(),
                    }));
                }
                data[range].copy_from_slice(&got);
            }
        }
        let span = |ranks: &Range<usize>| shard(ranks.start).start..shard(ranks.end - 1).end;
        let spans: Vec<_> = self.processes.iter().map(span).collect();
        self.lead(|across| {
            for (process, span) in spans.into_iter().enumerate() {
                across.broadcast(&mut data[span], process)?;
            }
            Ok(())
        })?;
        self.within(self.inside.broadcast(data, 0))
    }

    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        let inside = self.within(self.inside.all_gather_bytes(bytes))?;
        let all = self.lead(|across| Ok(across.all_gather_bytes(&pack(&inside))?.concat()))?;
        // Every rank takes part, and only the leader has something to say.
        let all = self.within(self.inside.all_gather_bytes(&all.unwrap_or_default()))?;
        Ok(unpack(&all[0]))
    }

    fn broadcast(&self, data: &mut [f32], root: usize) -> Result<(), Error> {
        let (process, thread) = self.place(root, "broadcast")?;
        if process == self.process {
            self.within(self.inside.broadcast(data, thread))?;
        }
        self.lead(|across| across.broadcast(data, process))?;
        if process == self.process {
            Ok(())
        } else {
            self.within(self.inside.broadcast(data, 0))
        }
    }

    fn send(&self, to: usize, tag: u64, data: Vec<f32>) -> Result<(), Error> {
        let thread = self.thread_here(to, tag, "send")?;
        self.within(self.inside.send(thread, tag, data))
    }

    fn recv(&self, from: usize, tag: u64) -> Result<Vec<f32>, Error> {
        let thread = self.thread_here(from, tag, "recv")?;
        self.within(self.inside.recv(thread, tag))
    }

    fn barrier(&self) -> Result<(), Error> {
        self.within(self.inside.barrier())?;
        self.lead(|across| across.barrier())?;
        self.within(self.inside.barrier())
    }

    /// As everywhere; but in each new group the ranks of a process must follow each other, and the processes keep their order.
    fn split(&self, color: usize, key: usize) -> Result<Box<dyn Communicator>, Error> {
        let places = self.all_gather_bytes(&[color.to_ne_bytes(), key.to_ne_bytes()].concat())?;
        let places: Vec<[usize; 2]> = places
            .iter()
            .map(|bytes| {
                let mut words = bytes
                    .as_chunks()
                    .0
                    .iter()
                    .map(|word| usize::from_ne_bytes(*word));
                std::array::from_fn(|_| words.next().unwrap_or_default())
            })
            .collect();
        let mut colors: Vec<usize> = places.iter().map(|place| place[0]).collect();
        colors.sort_unstable();
        colors.dedup();
        let process_of = |rank: usize| {
            self.processes
                .iter()
                .take_while(|ranks| ranks.end <= rank)
                .count()
        };
        for color in &colors {
            let ranks = group_of_color(&places, *color);
            if !ranks.is_sorted_by_key(|rank| process_of(*rank)) {
                let problem =
                    format!("color {color} orders ranks as {ranks:?}, expected process by process");
                return Err(self.fail(Error::Invalid {
                    what: "split of a hierarchical communicator",
                    problem,
                }));
            }
        }
        let here = |color: usize| self.own().any(|rank| places[rank][0] == color);
        self.lead(|across| {
            for color in &colors {
                let part = across.split(usize::from(!here(*color)), across.rank())?;
                if here(*color) {
                    self.handed_over
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .insert(*color, part);
                }
            }
            Ok(())
        })?;
        // The communicators across are there once the leader is here.
        let inside = self.within(self.inside.split(color, key))?;
        let leads = inside.rank() == 0;
        let across = if leads {
            self.handed_over
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .remove(&color)
        } else {
            None
        };
        // Members of the new group by process; processes without one are not in it.
        let count = |ranks: &Range<usize>| {
            places[ranks.clone()]
                .iter()
                .filter(|place| place[0] == color)
                .count()
        };
        let counts: Vec<usize> = self.processes.iter().map(count).collect();
        let process = counts[..self.process]
            .iter()
            .filter(|count| **count > 0)
            .count();
        let mut start = 0;
        let processes = counts
            .into_iter()
            .filter(|count| *count > 0)
            .map(|count| {
                start += count;
                start - count..start
            })
            .collect();
        Ok(Box::new(Self {
            inside,
            across,
            processes,
            process,
            handed_over: Arc::default(),
        }))
    }

    fn abort(&self, reason: &str) -> Error {
        if let Some(across) = &self.across {
            across.abort(reason);
        }
        self.inside.abort(reason)
    }
}

/// Messages one after the other, each after its length.
fn pack(messages: &[Vec<u8>]) -> Vec<u8> {
    messages
        .iter()
        .flat_map(|message| [&(message.len() as u64).to_ne_bytes()[..], message].concat())
        .collect()
}

fn unpack(mut bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut messages = Vec::new();
    while let Some((length, rest)) = bytes.split_first_chunk() {
        let (message, rest) = rest.split_at((u64::from_ne_bytes(*length) as usize).min(rest.len()));
        messages.push(message.to_vec());
        bytes = rest;
    }
    messages
}
