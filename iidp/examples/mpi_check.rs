//! Checks of the MPI communicator, to be started under `mpirun` by `scripts/mpi_tests.sh`.
//!
//! `mpi_check collectives` compares every collective with a sequential model. The other modes let one rank fail; every rank that is left prints the error it gets and
//! ends with exit code 0 if it is the right one. `mpi_check bench` compares the all-reduce with a bare `MPI_Allreduce` loop.

#![allow(clippy::print_stdout, reason = "the script reads what each rank found")]

use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use iidp::communicator::{Communicator, MpiCommunicator, shard_range};
use iidp::{Error, Loss};
use mpi::collective::{CommunicatorCollectives as _, SystemOperation};
use mpi::topology::SimpleCommunicator;

fn main() -> ExitCode {
    let mode = std::env::args().nth(1).unwrap_or_default();
    match run(&mode) {
        Ok(text) => {
            println!("{text}");
            ExitCode::SUCCESS
        }
        Err(text) => {
            println!("FAILED {text}");
            ExitCode::FAILURE
        }
    }
}

fn run(mode: &str) -> Result<String, String> {
    let timeout = if mode == "timeout" || mode == "kill" {
        Duration::from_secs(2)
    } else {
        Duration::from_secs(30)
    };
    let world = MpiCommunicator::world(timeout).map_err(|error| error.to_string())?;
    let (rank, size) = (world.rank(), world.size());
    if mode == "bench" {
        return bench(&world).map_err(|error| error.to_string());
    }
    if mode == "collectives" {
        return collectives(&world)
            .map(|()| format!("OK rank {rank} of {size}"))
            .map_err(|error| format!("rank {rank}: {error}"));
    }
    let last = size - 1;
    let Err(error) = fail(&world, mode) else {
        return if mode == "leave" && rank == last {
            Ok(format!("OK rank {rank} leaves"))
        } else {
            Err(format!("rank {rank} noticed nothing"))
        };
    };
    let right = match (mode, &error) {
        (
            "panic",
            Error::RankLost {
                rank,
                loss: Loss::Panicked,
                ..
            },
        )
        | (
            "leave",
            Error::RankLost {
                rank,
                loss: Loss::Left,
                ..
            },
        )
        | ("abort", Error::Aborted { rank, .. })
        | ("operation" | "length", Error::CollectiveMismatch { rank, .. }) => *rank == last,
        ("timeout" | "kill", Error::Timeout { missing, .. }) => missing.contains(&last),
        _ => false,
    };
    // Any later call says the same.
    let again = world.barrier().err();
    if right && again.as_ref() == Some(&error) {
        Ok(format!("OK rank {rank}: {error}"))
    } else {
        Err(format!("rank {rank}: {error}, later {again:?}"))
    }
}

/// The last rank does what the mode says, while the others work in a group of their own or wait for it.
fn fail(world: &MpiCommunicator, mode: &str) -> Result<(), Error> {
    let (rank, last) = (world.rank(), world.size() - 1);
    let pair = world.split(rank / 2, 0)?;
    world.barrier()?;
    if rank == last {
        match mode {
            // The communicator is dropped while the thread unwinds; the process then ends.
            "panic" => panic!("as the test wants it"),
            "kill" => std::process::abort(),
            "abort" => return Err(world.abort("loss is NaN")),
            "operation" => return world.broadcast(&mut [0.0; 5], 0),
            "length" => return world.all_reduce_sum(&mut vec![0.0; 500_000]),
            "leave" => return Ok(()),
            _ => {
                thread::sleep(Duration::from_secs(5));
                return world.barrier();
            }
        }
    }
    if mode == "panic" && pair.size() > 1 && last > 1 {
        // Ranks without the last one among them go on until they are told.
        loop {
            pair.barrier()?;
            if rank / 2 == last / 2 {
                world.all_reduce_sum(&mut [0.0; 5])?;
            }
        }
    }
    world.all_reduce_sum(&mut [0.0; 5])
}

/// Full mantissas, so that another order of summation would show.
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

fn sum(members: &[usize], len: usize, seed: u64) -> Vec<f32> {
    members[1..]
        .iter()
        .fold(data(members[0], len, seed), |mut sum, rank| {
            sum.iter_mut()
                .zip(data(*rank, len, seed))
                .for_each(|(sum, x)| *sum += x);
            sum
        })
}

fn same(got: &[f32], expected: &[f32], what: &str) {
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert!(bits(got) == bits(expected), "{what} differs");
}

fn collectives(world: &MpiCommunicator) -> Result<(), Error> {
    let everybody: Vec<usize> = (0..world.size()).collect();
    for (round, len) in [0, 1, 3, 17, 4096, 100_003, 300_001, 1_000_000]
        .into_iter()
        .enumerate()
    {
        all_operations(world, &everybody, len, round as u64)?;
    }
    // Groups of changing shape, in reversed order, and two at a time.
    for parts in 1..=3 {
        let part = world.split(world.rank() % parts, world.size() - world.rank())?;
        let members: Vec<usize> = (0..world.size())
            .rev()
            .filter(|rank| rank % parts == world.rank() % parts)
            .collect();
        assert_eq!(members[part.rank()], world.rank(), "order of a split");
        for len in [0, 5, 300_001] {
            all_operations(part.as_ref(), &members, len, 77)?;
        }
    }
    // A group may be used on a thread of its own beside the world.
    let twin = world.split(0, world.rank())?;
    let other = thread::spawn(move || {
        let mut sum = vec![1.0; 200_000];
        for _ in 0..5 {
            twin.all_reduce_sum(&mut sum)?;
        }
        Ok::<_, Error>(sum[0])
    });
    for _ in 0..20 {
        world.barrier()?;
    }
    let got = other.join().expect("no panic")?;
    let expected = (world.size() as f32).powi(5);
    assert!(
        (got - expected).abs() < 1e-3 * expected,
        "{got} on another thread, expected {expected}"
    );
    world.barrier()
}

/// `members` are the world ranks of `comm`, whose data each contributes.
fn all_operations(
    comm: &dyn Communicator,
    members: &[usize],
    len: usize,
    seed: u64,
) -> Result<(), Error> {
    let (rank, size) = (comm.rank(), comm.size());
    let mine = || data(members[rank], len, seed);
    let expected = sum(members, len, seed);
    let own = shard_range(len, size, rank);

    let mut reduced = mine();
    comm.all_reduce_sum(&mut reduced)?;
    same(&reduced, &expected, "all_reduce_sum");

    let mut doubles: Vec<f64> = mine().iter().map(|x| f64::from(*x) / 3.0).collect();
    comm.all_reduce_sum_f64(&mut doubles)?;
    let exact = |i: usize| {
        members
            .iter()
            .map(|member| f64::from(data(*member, len, seed)[i]) / 3.0)
            .reduce(|a, b| a + b)
    };
    for i in [0, len / 2, len.saturating_sub(1)]
        .into_iter()
        .filter(|i| *i < len)
    {
        assert_eq!(
            exact(i).map(f64::to_bits),
            Some(doubles[i].to_bits()),
            "all_reduce_sum_f64"
        );
    }

    let mut scattered = mine();
    assert_eq!(comm.reduce_scatter_sum(&mut scattered)?, own);
    let mut whole = mine();
    whole[own.clone()].copy_from_slice(&expected[own.clone()]);
    same(&scattered, &whole, "reduce_scatter_sum");

    let mut gathered = vec![f32::NAN; len];
    gathered[own.clone()].copy_from_slice(&expected[own]);
    comm.all_gather(&mut gathered)?;
    same(&gathered, &expected, "all_gather");

    let root = len % size;
    let mut sent = mine();
    comm.broadcast(&mut sent, root)?;
    same(&sent, &data(members[root], len, seed), "broadcast");

    let message = |rank: usize| vec![rank as u8; (rank * len) % 1000];
    let messages = comm.all_gather_bytes(&message(rank))?;
    assert_eq!(
        messages,
        (0..size).map(message).collect::<Vec<_>>(),
        "all_gather_bytes"
    );

    // Around the ring, tags fetched in another order than sent.
    let (left, right) = ((rank + size - 1) % size, (rank + 1) % size);
    comm.send(right, 1, mine())?;
    comm.send(right, u64::MAX, vec![rank as f32])?;
    comm.send(right, 1, Vec::new())?;
    same(&comm.recv(left, u64::MAX)?, &[left as f32], "recv");
    same(
        &comm.recv(left, 1)?,
        &data(members[left], len, seed),
        "recv",
    );
    same(&comm.recv(left, 1)?, &[], "recv");
    comm.barrier()
}

/// Milliseconds of the fastest and of the median all-reduce, here and bare.
fn bench(world: &MpiCommunicator) -> Result<String, Error> {
    let bare = SimpleCommunicator::world();
    let mut lines = vec![format!(
        "all-reduce over {} processes, ms: fastest (median)",
        world.size()
    )];
    for len in [256, 16 << 10, 256 << 10, 4 << 20] {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        let mut data = vec![1.0_f32; len];
        let (source, mut target) = (vec![1.0_f32; len], vec![0.0_f32; len]);
        for _ in 0..31 {
            world.barrier()?;
            let start = Instant::now();
            world.all_reduce_sum(&mut data)?;
            ours.push(start.elapsed().as_secs_f64() * 1e3);
            data.fill(1.0);
            world.barrier()?;
            let start = Instant::now();
            bare.all_reduce_into(&source[..], &mut target[..], SystemOperation::sum());
            theirs.push(start.elapsed().as_secs_f64() * 1e3);
        }
        ours.sort_by(f64::total_cmp);
        theirs.sort_by(f64::total_cmp);
        lines.push(format!(
            "{:>6} KiB: iidp {:.3} ({:.3}), bare rsmpi {:.3} ({:.3}), ratio {:.2} ({:.2})",
            4 * len / 1024,
            ours[0],
            ours[15],
            theirs[0],
            theirs[15],
            ours[0] / theirs[0],
            ours[15] / theirs[15],
        ));
    }
    Ok(if world.rank() == 0 {
        lines.join("\n")
    } else {
        String::new()
    })
}
