//! The sampler draws every sample exactly once per epoch, in an order that only the seed decides.

use iidp::sampler::LastBatch;
use iidp::{Error, ShardedSampler};
use proptest::prelude::*;

/// Cuts `0..batch` into the shards of a random layout.
fn shards(batch: usize, cuts: &[prop::sample::Index]) -> Vec<std::ops::Range<usize>> {
    let mut at: Vec<usize> = cuts
        .iter()
        .map(|cut| cut.index(batch + 1))
        .chain([0, batch])
        .collect();
    at.sort_unstable();
    at.windows(2).map(|pair| pair[0]..pair[1]).collect()
}

/// Batch sizes, each with the layout it is drawn under, and whether the job restarts after it.
fn plan() -> impl Strategy<Value = Vec<(usize, Vec<prop::sample::Index>, bool)>> {
    let layout = prop::collection::vec(any::<prop::sample::Index>(), 0..6);
    prop::collection::vec((1..70_usize, layout, any::<bool>()), 1..40)
}

proptest! {
    #[test]
    fn every_sample_once_per_epoch_under_any_batches_and_layouts(n in 1..150_u64, seed: u64, plan in plan()) {
        let mut sampler = ShardedSampler::new(n, seed)?;
        let mut drawn = Vec::new();
        for (batch, cuts, restart) in plan {
            // Every rank has a sampler of its own and draws its part.
            let mut after = sampler;
            for shard in shards(batch, &cuts) {
                let mut rank = sampler;
                drawn.extend(rank.take_shard(batch, shard)?);
                after = rank;
            }
            sampler = after;
            if restart {
                let text = serde_json::to_string(&sampler).expect("serialisable");
                sampler = serde_json::from_str(&text).expect("readable");
            }
        }
        // The same as one device drawing one sample at a time.
        let mut reference = ShardedSampler::new(n, seed)?;
        for (position, sample) in drawn.iter().enumerate() {
            prop_assert_eq!(&reference.take(1)?, &[*sample]);
            prop_assert_eq!(reference.at(position as u64 / n, position as u64 % n)?, *sample);
        }
        prop_assert_eq!(reference, sampler);
        for epoch in drawn.chunks(n as usize) {
            let mut sorted = epoch.to_vec();
            sorted.sort_unstable();
            sorted.dedup();
            prop_assert_eq!(sorted.len(), epoch.len());
            prop_assert!(sorted.iter().all(|&sample| sample < n));
        }
    }

    #[test]
    fn short_batches_end_each_epoch(n in 1..60_u64, seed: u64, batches in prop::collection::vec(1..30_usize, 1..60)) {
        let mut sampler = ShardedSampler::new(n, seed)?.with_last_batch(LastBatch::Short);
        let mut reference = ShardedSampler::new(n, seed)?;
        for batch in batches {
            let expected = sampler.remaining().min(batch as u64) as usize;
            let drawn = sampler.take(batch)?;
            prop_assert_eq!(drawn.len(), expected);
            prop_assert_eq!(drawn, reference.take(expected)?);
        }
    }

    #[test]
    fn skipped_rests_start_the_next_epoch(n in 1..60_u64, seed: u64, batches in prop::collection::vec(1..30_usize, 1..60)) {
        let mut sampler = ShardedSampler::new(n, seed)?.with_last_batch(LastBatch::Skip);
        for batch in batches {
            let before = sampler;
            let Ok(drawn) = sampler.take(batch) else {
                prop_assert!(batch as u64 > n);
                prop_assert_eq!(sampler, before);
                continue;
            };
            let (epoch, offset) =
                if before.remaining() < batch as u64 { (before.epoch() + 1, 0) } else { (before.epoch(), before.offset()) };
            for (i, sample) in drawn.iter().enumerate() {
                prop_assert_eq!(sampler.at(epoch, offset + i as u64)?, *sample);
            }
            prop_assert_eq!(drawn.len(), batch);
        }
    }
}

#[test]
fn seeds_and_epochs_have_different_orders() {
    let orders: Vec<Vec<u64>> = [(1, 0), (1, 1), (2, 0), (2, 1)]
        .iter()
        .map(|&(seed, epoch)| {
            let mut sampler = ShardedSampler::new(1000, seed).expect("samples");
            sampler.seek(epoch, 0).expect("in range");
            sampler.take(1000).expect("samples")
        })
        .collect();
    for (i, a) in orders.iter().enumerate() {
        for b in &orders[..i] {
            let fixed = a.iter().zip(b).filter(|(x, y)| x == y).count();
            assert!(fixed < 10, "{fixed} of 1000 samples in the same place");
        }
    }
}

#[test]
fn a_batch_may_span_several_epochs() {
    let mut sampler = ShardedSampler::new(3, 7).expect("samples");
    let drawn = sampler.take(10).expect("filled");
    for epoch in drawn.chunks(3).take(3) {
        let mut sorted = epoch.to_vec();
        sorted.sort_unstable();
        assert_eq!(sorted, [0, 1, 2]);
    }
    assert_eq!((sampler.epoch(), sampler.offset()), (3, 1));
}

#[test]
fn impossible_requests_are_named() {
    let text = |result: Result<Vec<u64>, Error>| result.expect_err("refused").to_string();
    assert_eq!(
        ShardedSampler::new(0, 1).unwrap_err().to_string(),
        "sampler: 0 samples, expected at least 1"
    );
    let mut sampler = ShardedSampler::new(5, 1).expect("samples");
    assert_eq!(
        text(sampler.take(0)),
        "batch: 0 samples, expected at least 1"
    );
    assert_eq!(
        text(sampler.take_shard(4, 2..5)),
        "shard of a batch: 2..5, expected a part of 0..4"
    );
    assert_eq!(
        sampler.seek(0, 5).unwrap_err().to_string(),
        "position of a sampler: sample 5 of an epoch of 5"
    );
    assert_eq!(sampler, ShardedSampler::new(5, 1).expect("samples"));
    let mut sampler = sampler.with_last_batch(LastBatch::Skip);
    assert_eq!(
        text(sampler.take(6)),
        "batch: 6 samples, expected at most the 5 of an epoch, since partial batches are skipped"
    );
    let broken = r#"{"samples":5,"seed":1,"last_batch":"fill","epoch":0,"offset":9}"#;
    assert!(
        serde_json::from_str::<ShardedSampler>(broken)
            .unwrap_err()
            .to_string()
            .contains("sample 9 of an epoch of 5")
    );
}
