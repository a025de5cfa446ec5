//! Two levels of threads behave like one flat group.

use std::thread;
use std::time::Duration;

use iidp::communicator::{Communicator, HierarchicalCommunicator, LocalCommunicator, shard_range};
use iidp::{Error, Loss};
use proptest::prelude::*;

/// Runs `body` on every rank of machines with these numbers of threads; results in rank order.
fn on_ranks<R: Send + 'static>(
    threads: &[usize],
    body: impl Fn(HierarchicalCommunicator) -> Result<R, Error> + Clone + Send + 'static,
) -> Vec<thread::Result<Result<R, Error>>> {
    let timeout = Duration::from_secs(30);
    let machines: Vec<_> = LocalCommunicator::group(threads.len(), timeout)
        .expect("machines")
        .into_iter()
        .zip(threads.to_vec())
        .map(|(across, threads)| {
            let body = body.clone();
            thread::spawn(move || {
                let ranks = HierarchicalCommunicator::group(Box::new(across), threads, timeout)
                    .expect("threads");
                let ranks: Vec<_> = ranks
                    .into_iter()
                    .map(|rank| {
                        let body = body.clone();
                        thread::spawn(move || body(rank))
                    })
                    .collect();
                ranks
                    .into_iter()
                    .map(thread::JoinHandle::join)
                    .collect::<Vec<_>>()
            })
        })
        .collect();
    machines
        .into_iter()
        .flat_map(|machine| machine.join().expect("a machine"))
        .collect()
}

/// Whole numbers: exact in any order of summation.
fn data(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| (rank * 31 + i * 7 % 101) as f32).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn equals_a_flat_group(threads in prop::collection::vec(1..4_usize, 1..4), len in 0..50_usize, root in any::<prop::sample::Index>()) {
        let size: usize = threads.iter().sum();
        let root = root.index(size);
        let results = on_ranks(&threads, move |comm| {
            let rank = comm.rank();
            let own = shard_range(len, comm.size(), rank);
            let mut sum = data(rank, len);
            comm.all_reduce_sum(&mut sum)?;
            let mut doubles: Vec<f64> = data(rank, len).into_iter().map(f64::from).collect();
            comm.all_reduce_sum_f64(&mut doubles)?;
            let mut scattered = data(rank, len);
            assert_eq!(comm.reduce_scatter_sum(&mut scattered)?, own);
            let mut gathered = vec![-1.0; len];
            gathered[own.clone()].copy_from_slice(&data(9, len)[own.clone()]);
            comm.all_gather(&mut gathered)?;
            let mut sent = data(rank, len);
            comm.broadcast(&mut sent, root)?;
            let messages = comm.all_gather_bytes(&vec![rank as u8; rank * 3 % 5])?;
            comm.barrier()?;
            Ok((rank, comm.size(), sum, doubles, scattered[own.clone()].to_vec(), gathered, sent, messages))
        });
        let mut expected = vec![0.0; len];
        for rank in 0..size {
            expected.iter_mut().zip(data(rank, len)).for_each(|(sum, x)| *sum += x);
        }
        for (index, result) in results.into_iter().enumerate() {
            let (rank, got_size, sum, doubles, scattered, gathered, sent, messages) = result.expect("no panic")?;
            prop_assert_eq!((rank, got_size), (index, size));
            prop_assert_eq!(&sum, &expected);
            prop_assert_eq!(doubles, expected.iter().map(|x| f64::from(*x)).collect::<Vec<_>>());
            prop_assert_eq!(&scattered, &expected[shard_range(len, size, rank)]);
            prop_assert_eq!(gathered, data(9, len));
            prop_assert_eq!(sent, data(root, len));
            prop_assert_eq!(messages, (0..size).map(|rank| vec![rank as u8; rank * 3 % 5]).collect::<Vec<_>>());
        }
    }

    #[test]
    fn splits_like_a_flat_group(threads in prop::collection::vec(1..4_usize, 1..4), colors in prop::collection::vec(0..3_usize, 9)) {
        let given = colors.clone();
        let results = on_ranks(&threads, move |comm| {
            let part = comm.split(given[comm.rank()], 5)?;
            let mut sum = [comm.rank() as f32];
            part.all_reduce_sum(&mut sum)?;
            comm.barrier()?;
            Ok((part.rank(), part.size(), sum[0] as usize))
        });
        let size: usize = threads.iter().sum();
        for (rank, result) in results.into_iter().enumerate() {
            let members: Vec<usize> = (0..size).filter(|other| colors[*other] == colors[rank]).collect();
            let place = members.iter().take_while(|member| **member != rank).count();
            prop_assert_eq!(result.expect("no panic")?, (place, members.len(), members.iter().sum()));
        }
    }
}

#[test]
fn a_panic_ends_the_ranks_of_all_machines() {
    let results = on_ranks(&[2, 1, 2], |comm| {
        comm.barrier()?;
        if comm.rank() == 4 {
            std::panic::resume_unwind(Box::new("killed by the test"));
        }
        comm.all_reduce_sum(&mut [1.0; 3])
    });
    for (rank, result) in results
        .into_iter()
        .enumerate()
        .filter(|(rank, _)| *rank != 4)
    {
        let error = result.expect("no panic").expect_err("every rank fails");
        let text = error.to_string();
        let named = matches!(
            error,
            Error::RankLost {
                loss: Loss::Panicked,
                ..
            }
        ) || text.contains("panicked")
            || text.contains("aborted");
        assert!(named, "rank {rank}: {text}");
    }
}

#[test]
fn messages_stay_inside_a_machine() {
    let results = on_ranks(&[2, 1], |comm| match comm.rank() {
        0 => comm.send(1, 3, vec![4.0]).map(|()| Vec::new()),
        _ => comm.recv(0, 3),
    });
    let errors: Vec<_> = results
        .into_iter()
        .map(|result| result.expect("no panic").map_err(|error| error.to_string()))
        .collect();
    assert_eq!(errors[1], Ok(vec![4.0]));
    assert!(
        errors[2]
            .as_ref()
            .is_err_and(|text| text.contains("expected ranks of one process")),
        "{errors:?}"
    );
}
