//! Where the executor meets the gradient statistics: the accumulation pass of each rank goes through a meter.

use adaptive_batch::{
    Gather, GradientMeter, MeterConfig, MicroBatch, MicroBatchStats, Placement, Shard, Weighting,
};
use iidp::{
    BoxError, Communicator, GradientBucket, MicroBatchObserver, MicroBatchRef, ObserverContext,
};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// The statistics of the last committed step. Rank 0 leaves them here; all ranks hold the same.
#[derive(Debug, Clone, Default)]
pub(crate) struct Measured(Arc<Mutex<Option<MicroBatchStats>>>);

impl Measured {
    /// Takes the statistics of the last step out, if it was committed.
    pub(crate) fn take(&self) -> Option<MicroBatchStats> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn put(&self, stats: MicroBatchStats) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(stats);
    }

    /// The observer of one rank.
    pub(crate) fn observer(&self, context: &ObserverContext<'_>) -> Box<dyn MicroBatchObserver> {
        let meter = Placement::data_parallel(context.rank, context.ranks).and_then(|placement| {
            // One shard per trainable tensor: the executor passes gradients tensor by tensor.
            let shards = context
                .parameters
                .slots()
                .iter()
                .map(|s| Shard::new(s.path.clone(), s.len));
            MeterConfig::new(shards).placement(placement).build()
        });
        match meter {
            Ok(meter) => Box::new(MeteredAccumulation {
                meter,
                report_to: (context.rank == 0).then(|| self.clone()),
                used: BTreeMap::new(),
                stats: None,
            }),
            Err(error) => Box::new(Refused(Some(error))),
        }
    }
}

/// Adds each gradient into the accumulator and measures it in the same pass.
struct MeteredAccumulation {
    meter: GradientMeter,
    /// `None` on all ranks but the first.
    report_to: Option<Measured>,
    /// What each micro-batch of this step gave a gradient to; for the rest see [`Self::measure_unused`].
    used: BTreeMap<u64, Used>,
    stats: Option<MicroBatchStats>,
}

struct Used {
    samples: u64,
    slots: Vec<usize>,
}

impl MicroBatchObserver for MeteredAccumulation {
    fn accumulate(
        &mut self,
        at: &MicroBatchRef,
        accumulator: &mut [f32],
        gradient: &[f32],
    ) -> Result<(), BoxError> {
        if self.used.is_empty() {
            self.meter.set_weighting(Weighting::Fraction {
                batch: at.global_batch as u64,
            })?;
        }
        let (index, samples) = (at.micro_batch as u64, at.samples as u64);
        self.used
            .entry(index)
            .or_insert_with(|| Used {
                samples,
                slots: Vec::new(),
            })
            .slots
            .push(at.slot);
        self.meter.accumulate(
            at.slot,
            MicroBatch { index, samples },
            accumulator,
            gradient,
        )?;
        Ok(())
    }

    fn reduced(&mut self, bucket: &GradientBucket, gradient: &[f32]) -> Result<(), BoxError> {
        let mut from = 0;
        for slot in bucket.slots.clone() {
            let to = from + self.meter.shards()[slot].len();
            self.meter.summed(slot, &gradient[from..to])?;
            from = to;
        }
        Ok(())
    }

    fn gather(&mut self, communicator: &dyn Communicator) -> Result<(), BoxError> {
        self.measure_unused()?;
        self.stats = Some(
            self.meter
                .finish_gathered(&mut OverCommunicator(communicator))?,
        );
        Ok(())
    }

    fn committed(&mut self) {
        self.used.clear();
        if let (Some(stats), Some(measured)) = (self.stats.take(), &self.report_to) {
            measured.put(stats);
        }
    }

    fn discarded(&mut self) {
        self.used.clear();
        self.stats = None;
        self.meter.reset();
    }
}

impl MeteredAccumulation {
    /// A tensor that a micro-batch did not use has a gradient of zero there, which the executor does not pass. The meter wants to
    /// hear of it, since it takes silence for a loss.
    fn measure_unused(&mut self) -> Result<(), adaptive_batch::Error> {
        let tensors = self.meter.shards().len();
        for (&index, used) in self.used.iter().filter(|(_, u)| u.slots.len() < tensors) {
            for slot in (0..tensors).filter(|slot| !used.slots.contains(slot)) {
                let zeros = vec![0.0_f32; self.meter.shards()[slot].len()];
                self.meter.measure(
                    slot,
                    MicroBatch {
                        index,
                        samples: used.samples,
                    },
                    &zeros,
                )?;
            }
        }
        Ok(())
    }
}

/// The executor's communicator as the statistics need it.
struct OverCommunicator<'a>(&'a dyn Communicator);

impl Gather for OverCommunicator<'_> {
    fn all_reduce_sum(&mut self, scalars: &mut [f64]) -> Result<(), adaptive_batch::Error> {
        self.0
            .all_reduce_sum_f64(scalars)
            .map_err(|e| adaptive_batch::Error::Gather(Box::new(e)))
    }
}

/// Stands in for a meter that could not be made and ends the first step with the reason.
struct Refused(Option<adaptive_batch::Error>);

impl MicroBatchObserver for Refused {
    fn accumulate(&mut self, _: &MicroBatchRef, _: &mut [f32], _: &[f32]) -> Result<(), BoxError> {
        Err(self.0.take().map_or_else(
            || "the gradient meter could not be made".into(),
            BoxError::from,
        ))
    }
}
