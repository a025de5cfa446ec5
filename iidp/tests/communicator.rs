//! Every collective of the local communicator against a sequential model, and every way in which a group can fail.

use std::thread;
use std::time::{Duration, Instant};

use iidp::communicator::{
    Collective, CollectiveCall, Communicator, LocalCommunicator, shard_range,
};
use iidp::{Error, Loss};
use proptest::prelude::*;

/// Long enough for any machine; failures other than time-outs are seen at once.
const PATIENCE: Duration = Duration::from_secs(30);

/// Runs `body` on every rank of a group, returns what the ranks returned (or how they panicked).
fn on_ranks<R: Send + 'static>(
    size: usize,
    timeout: Duration,
    body: impl Fn(LocalCommunicator) -> R + Clone + Send + 'static,
) -> Vec<thread::Result<R>> {
    let group = LocalCommunicator::group(size, timeout).expect("a valid group");
    let ranks: Vec<_> = group
        .into_iter()
        .map(|comm| {
            let body = body.clone();
            thread::spawn(move || body(comm))
        })
        .collect();
    ranks.into_iter().map(thread::JoinHandle::join).collect()
}

fn succeed<R: Send + 'static>(
    size: usize,
    body: impl Fn(LocalCommunicator) -> Result<R, Error> + Clone + Send + 'static,
) -> Vec<R> {
    let results = on_ranks(size, PATIENCE, body);
    results
        .into_iter()
        .map(|result| result.expect("no panic").expect("no error"))
        .collect()
}

/// Rank `rank`'s data: full mantissas, so that another order of summation would show.
fn data(rank: usize, len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (rank as u64 + 1);
    (0..len)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as f32 / 1e9 - 1.0
        })
        .collect()
}

/// The sum in rank order.
fn sum(size: usize, len: usize, seed: u64) -> Vec<f32> {
    (1..size).fold(data(0, len, seed), |mut sum, rank| {
        sum.iter_mut()
            .zip(data(rank, len, seed))
            .for_each(|(sum, x)| *sum += x);
        sum
    })
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Lengths around the places where the method changes: empty, shorter than the group, odd, one meeting, several rounds.
fn lengths() -> impl Strategy<Value = usize> {
    prop_oneof![
        0..20_usize,
        4000..4200_usize,
        100_000..140_000_usize,
        250_000..420_000_usize
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn all_reduce_is_the_sum_in_rank_order(size in 1..=8_usize, len in lengths(), seed: u64) {
        let results = succeed(size, move |comm| {
            let mut mine = data(comm.rank(), len, seed);
            comm.all_reduce_sum(&mut mine).map(|()| mine)
        });
        let expected = bits(&sum(size, len, seed));
        for result in results {
            prop_assert_eq!(bits(&result), &expected[..]);
        }
    }

    #[test]
    fn all_reduce_f64_is_the_sum_in_rank_order(size in 1..=8_usize, len in 0..9000_usize, seed: u64) {
        let doubles = move |rank| data(rank, len, seed).into_iter().map(|x| f64::from(x) / 3.0).collect::<Vec<_>>();
        let results = succeed(size, move |comm| {
            let mut mine = doubles(comm.rank());
            comm.all_reduce_sum_f64(&mut mine).map(|()| mine)
        });
        let expected = (1..size).fold(doubles(0), |mut sum, rank| {
            sum.iter_mut().zip(doubles(rank)).for_each(|(sum, x)| *sum += x);
            sum
        });
        for result in results {
            prop_assert_eq!(&result, &expected);
        }
    }

    #[test]
    fn reduce_scatter_sums_the_own_shard_and_leaves_the_rest(size in 1..=8_usize, len in lengths(), seed: u64) {
        let results = succeed(size, move |comm| {
            let mut mine = data(comm.rank(), len, seed);
            comm.reduce_scatter_sum(&mut mine).map(|range| (range, mine))
        });
        let expected = sum(size, len, seed);
        for (rank, (range, result)) in results.into_iter().enumerate() {
            prop_assert_eq!(range.clone(), shard_range(len, size, rank));
            let mut whole = data(rank, len, seed);
            whole[range.clone()].copy_from_slice(&expected[range]);
            prop_assert_eq!(bits(&result), bits(&whole));
        }
    }

    #[test]
    fn all_gather_completes_the_buffer(size in 1..=8_usize, len in lengths(), seed: u64) {
        let whole = data(0, len, seed);
        let results = succeed(size, move |comm| {
            let mut mine = vec![f32::NAN; len];
            let range = shard_range(len, comm.size(), comm.rank());
            mine[range.clone()].copy_from_slice(&data(0, len, seed)[range]);
            comm.all_gather(&mut mine).map(|()| mine)
        });
        for result in results {
            prop_assert_eq!(bits(&result), bits(&whole));
        }
    }

    #[test]
    fn broadcast_copies_the_root(size in 1..=8_usize, root in 0..8_usize, len in lengths(), seed: u64) {
        let root = root % size;
        let results = succeed(size, move |comm| {
            let mut mine = data(comm.rank(), len, seed);
            comm.broadcast(&mut mine, root).map(|()| mine)
        });
        for result in results {
            prop_assert_eq!(bits(&result), bits(&data(root, len, seed)));
        }
    }

    #[test]
    fn bytes_of_any_length_are_gathered(messages in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..50), 1..=8)) {
        let sent = messages.clone();
        let results = succeed(messages.len(), move |comm| comm.all_gather_bytes(&sent[comm.rank()]));
        for result in results {
            prop_assert_eq!(&result, &messages);
        }
    }

    /// Splits a group at random, sums in each part while neighbours exchange messages, and sums in the whole group again.
    #[test]
    fn split_groups_by_color_in_key_order(
        places in prop::collection::vec((0..3_usize, 0..4_usize), 1..=8),
        len in 0..6000_usize,
        seed: u64,
    ) {
        let size = places.len();
        let given = places.clone();
        let results = succeed(size, move |comm| {
            let (color, key) = given[comm.rank()];
            let part = comm.split(color, key)?;
            let right = (part.rank() + 1) % part.size();
            let left = (part.rank() + part.size() - 1) % part.size();
            part.send(right, 7, vec![comm.rank() as f32])?;
            let mut mine = data(comm.rank(), len, seed);
            part.all_reduce_sum(&mut mine)?;
            let neighbour = part.recv(left, 7)?;
            let mut count = [1.0];
            comm.all_reduce_sum(&mut count)?;
            Ok((part.rank(), part.size(), mine, neighbour, count))
        });
        for (rank, (part_rank, part_size, result, neighbour, count)) in results.into_iter().enumerate() {
            let mut members: Vec<_> = (0..size).filter(|&other| places[other].0 == places[rank].0).collect();
            members.sort_by_key(|&member| (places[member].1, member));
            prop_assert_eq!(part_size, members.len());
            prop_assert_eq!(members[part_rank], rank);
            let mut expected = data(members[0], len, seed);
            for &member in &members[1..] {
                expected.iter_mut().zip(data(member, len, seed)).for_each(|(sum, x)| *sum += x);
            }
            prop_assert_eq!(bits(&result), bits(&expected));
            prop_assert_eq!(neighbour, vec![members[(part_rank + part_size - 1) % part_size] as f32]);
            prop_assert_eq!(bits(&count), bits(&[size as f32]));
        }
    }

    /// Any sequence of collectives of changing kind and length, with ranks that fall behind at random.
    #[test]
    fn sequences_of_collectives_stay_in_step(
        size in 2..=6_usize,
        steps in prop::collection::vec((0..5_u8, 0..12_000_usize), 1..25),
        seed: u64,
    ) {
        let script = steps.clone();
        let results = succeed(size, move |comm| {
            let mut digest = Vec::new();
            for (step, &(kind, len)) in script.iter().enumerate() {
                if data(comm.rank(), 1, seed ^ step as u64)[0] > 0.8 {
                    thread::sleep(Duration::from_micros(300));
                }
                let mut mine = data(comm.rank(), len, seed ^ step as u64);
                match kind {
                    0 => comm.all_reduce_sum(&mut mine)?,
                    1 => {
                        let range = comm.reduce_scatter_sum(&mut mine)?;
                        mine = mine[range].to_vec();
                        mine.resize(1, 0.0);
                        comm.broadcast(&mut mine, step % comm.size())?;
                    }
                    2 => comm.all_gather(&mut mine)?,
                    3 => comm.broadcast(&mut mine, step % comm.size())?,
                    _ => {
                        comm.barrier()?;
                        mine.clear();
                    }
                }
                digest.push(bits(&mine));
            }
            Ok(digest)
        });
        for result in &results[1..] {
            prop_assert_eq!(result, &results[0]);
        }
        for (step, &(kind, len)) in steps.iter().enumerate() {
            let seed = seed ^ step as u64;
            let expected = match kind {
                0 => sum(size, len, seed),
                3 => data(step % size, len, seed),
                _ => continue,
            };
            prop_assert_eq!(&results[0][step], &bits(&expected));
        }
    }
}

#[test]
fn messages_keep_their_order_per_tag_and_may_be_fetched_in_any_order_of_tags() {
    let results = succeed(2, |comm| {
        if comm.rank() == 0 {
            for i in 0..4 {
                comm.send(1, u64::from(i % 2 == 0), vec![f32::from(i as u8); i])?;
            }
            comm.recv(1, 9).map(|last| vec![last])
        } else {
            let fetched = [0, 1, 1, 0].map(|tag| comm.recv(0, tag));
            comm.send(0, 9, Vec::new())?;
            fetched.into_iter().collect()
        }
    });
    assert_eq!(results[0], [Vec::<f32>::new()]);
    assert_eq!(results[1], [vec![1.0], vec![], vec![2.0; 2], vec![3.0; 3]]);
}

#[test]
fn a_rank_may_leave_when_all_is_said() {
    let results = succeed(3, |comm| {
        if comm.rank() == 0 {
            comm.send(2, 1, vec![5.0])?;
        }
        comm.barrier()?;
        if comm.rank() == 2 {
            thread::sleep(Duration::from_millis(30));
            return comm.recv(0, 1);
        }
        Ok(vec![5.0])
    });
    assert_eq!(results, [[5.0], [5.0], [5.0]]);
}

#[test]
fn impossible_groups_are_refused() {
    assert!(matches!(
        LocalCommunicator::group(0, PATIENCE),
        Err(Error::Invalid {
            what: "communicator size",
            ..
        })
    ));
    assert!(matches!(
        LocalCommunicator::group(2, Duration::ZERO),
        Err(Error::Invalid { .. })
    ));
}

/// All ranks that did not panic returned the same error.
fn common_error(results: Vec<thread::Result<Result<(), Error>>>) -> Error {
    let errors: Vec<_> = results
        .into_iter()
        .flatten()
        .map(|result| result.expect_err("every rank fails"))
        .collect();
    assert!(!errors.is_empty());
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    errors[0].clone()
}

#[test]
fn a_panic_ends_every_rank_wherever_it_waits() {
    for waiting in 0..4 {
        let results = on_ranks(4, PATIENCE, move |comm| {
            let pair = comm.split(comm.rank() / 2, 0)?;
            if comm.rank() == 2 {
                thread::sleep(Duration::from_millis(20));
                std::panic::resume_unwind(Box::new("killed by the test"));
            }
            match waiting {
                0 => comm.barrier(),
                1 => comm.all_reduce_sum(&mut vec![0.0; 300_000]),
                2 => pair.recv(1 - pair.rank(), 0).map(drop),
                // Ranks 0 and 1 share no communicator with rank 2 that they wait on.
                _ => loop {
                    pair.barrier()?;
                },
            }
        });
        assert_eq!(results.iter().filter(|result| result.is_err()).count(), 1);
        let error = common_error(results);
        assert!(
            matches!(
                error,
                Error::RankLost {
                    rank: 2,
                    loss: Loss::Panicked,
                    ..
                }
            ),
            "{error}"
        );
    }
}

#[test]
fn a_rank_that_leaves_early_ends_the_others() {
    for collective in [true, false] {
        let results = on_ranks(3, PATIENCE, move |comm| match (comm.rank(), collective) {
            (1, _) => {
                thread::sleep(Duration::from_millis(20));
                drop(comm);
                Err(Error::Invalid {
                    what: "test",
                    problem: "left".into(),
                })
            }
            (_, true) => comm.all_gather(&mut [0.0; 9]),
            (_, false) => comm.recv(1, 3).map(drop),
        });
        let error = common_error(
            [0, 2]
                .map(|rank| Ok(results[rank].as_ref().expect("no panic").clone()))
                .into(),
        );
        assert!(
            matches!(
                error,
                Error::RankLost {
                    rank: 1,
                    loss: Loss::Left,
                    ..
                }
            ),
            "{error}"
        );
    }
}

#[test]
fn another_collective_is_named_on_every_rank() {
    let results = on_ranks(3, PATIENCE, |comm| {
        comm.barrier()?;
        if comm.rank() == 2 {
            comm.broadcast(&mut [0.0; 4], 1)
        } else {
            comm.all_reduce_sum(&mut [0.0; 4])
        }
    });
    let expected = Error::CollectiveMismatch {
        sequence: 1,
        rank: 2,
        got: CollectiveCall {
            collective: Collective::Broadcast { root: 1 },
            length: 4,
        },
        expected_rank: 0,
        expected: CollectiveCall {
            collective: Collective::AllReduceSum,
            length: 4,
        },
    };
    assert_eq!(common_error(results), expected);
    assert_eq!(
        expected.to_string(),
        "collective 1: rank 2 called broadcast(root 1) of 4 elements where rank 0 called all_reduce_sum of 4 elements"
    );
}

#[test]
fn another_length_is_named_on_every_rank_whatever_the_method() {
    for lengths in [[10, 11], [10, 500_000], [400_000, 500_000], [0, 1]] {
        let results = on_ranks(4, PATIENCE, move |comm| {
            comm.all_reduce_sum(&mut vec![0.0; lengths[usize::from(comm.rank() == 3)]])
        });
        let error = common_error(results);
        let Error::CollectiveMismatch {
            rank: 3,
            got,
            expected,
            ..
        } = error
        else {
            panic!("{error}")
        };
        assert_eq!([expected.length, got.length], lengths);
    }
}

#[test]
fn another_root_is_a_mismatch_and_a_root_outside_is_refused() {
    let error = common_error(on_ranks(2, PATIENCE, |comm| {
        comm.broadcast(&mut [0.0], comm.rank())
    }));
    assert!(
        matches!(error, Error::CollectiveMismatch { rank: 1, .. }),
        "{error}"
    );
    let error = common_error(on_ranks(2, PATIENCE, |comm| comm.broadcast(&mut [0.0], 2)));
    assert!(
        matches!(
            error,
            Error::RankOutOfRange {
                got: 2,
                size: 2,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn a_late_rank_is_named_and_gets_the_error_too() {
    let start = Instant::now();
    let results = on_ranks(3, Duration::from_millis(80), |comm| {
        if comm.rank() == 1 {
            while comm.recv(1, 0).is_ok() {}
        }
        comm.barrier()
    });
    // Rank 1 waits for itself: all three run into the limit, the first to do so names whom it missed.
    let error = common_error(results);
    assert!(
        matches!(&error, Error::Timeout { missing, .. } if missing == &[1]),
        "{error}"
    );
    assert!(start.elapsed() < PATIENCE);
}

#[test]
fn abort_ends_the_whole_world_and_stays() {
    let results = on_ranks(4, PATIENCE, |comm| {
        let pair = comm.split(comm.rank() % 2, comm.rank())?;
        let error = if comm.rank() == 3 {
            pair.abort("loss is NaN")
        } else {
            pair.recv(1 - pair.rank(), 0).unwrap_err()
        };
        for again in [
            comm.barrier(),
            pair.barrier(),
            comm.send(0, 0, Vec::new()),
            pair.split(0, 0).map(drop),
        ] {
            assert_eq!(again, Err(error.clone()));
        }
        assert_eq!(comm.abort("later"), error);
        Err(error)
    });
    assert_eq!(
        common_error(results),
        Error::Aborted {
            rank: 3,
            reason: "loss is NaN".into()
        }
    );
}
