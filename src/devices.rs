//! The ranks of a run and how a global batch is divided among them.

use crate::error::Error;
use crate::simulated::SimulatedCluster;
use iidp::{RankCost, WorkerLayout, assign_workers};

/// What each rank does at one global batch size, and what that would take on the simulated cluster.
#[derive(Debug, Clone)]
pub(crate) struct Assignment {
    /// One layout per rank.
    pub(crate) layouts: Vec<WorkerLayout>,
    /// *Simulated* seconds and cost of a step; `None` on local devices.
    pub(crate) simulated: Option<(f64, f64)>,
}

impl Assignment {
    /// Micro-batches per step of each rank.
    pub(crate) fn micro_batches(&self) -> Vec<usize> {
        self.layouts
            .iter()
            .map(|l| l.virtual_workers * l.accumulation_steps)
            .collect()
    }
}

/// Where ranks come from.
#[derive(Debug)]
pub(crate) enum Devices {
    /// Logical devices of this machine with their relative speeds.
    Local {
        /// Speed of each device relative to the others; micro-batches are divided in proportion.
        speeds: Vec<f64>,
        /// Samples per micro-batch.
        local_batch: usize,
    },
    /// One logical device per GPU of the planned allocation.
    Simulated(Box<SimulatedCluster>),
}

impl Devices {
    /// Number of ranks.
    pub(crate) fn ranks(&self) -> usize {
        match self {
            Self::Local { speeds, .. } => speeds.len(),
            Self::Simulated(cluster) => cluster.ranks(),
        }
    }

    /// One line per rank.
    pub(crate) fn names(&self) -> Vec<String> {
        match self {
            Self::Local { speeds, .. } => speeds
                .iter()
                .map(|s| format!("local device, relative speed {s}"))
                .collect(),
            Self::Simulated(cluster) => cluster.device_names(),
        }
    }

    /// Divides a global batch among the ranks so that all finish together as nearly as may be. Deterministic.
    ///
    /// # Errors
    /// If the batch is no multiple of the local batch, or smaller than one micro-batch per rank.
    pub(crate) fn assign(&self, batch: usize) -> Result<Assignment, Error> {
        match self {
            Self::Local {
                speeds,
                local_batch,
            } => local(speeds, *local_batch, batch),
            Self::Simulated(cluster) => cluster.assign(batch),
        }
    }
}

/// Each device runs one virtual worker; its accumulation steps follow its speed.
fn local(speeds: &[f64], local_batch: usize, batch: usize) -> Result<Assignment, Error> {
    let ranks: Vec<RankCost> = speeds
        .iter()
        .map(|speed| RankCost::new(speed.recip()))
        .collect();
    let layouts = assign_workers(batch, local_batch, &ranks)?.layouts;
    Ok(Assignment {
        layouts,
        simulated: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faster_devices_get_more_micro_batches() {
        let devices = Devices::Local {
            speeds: vec![1.0, 0.5, 1.0],
            local_batch: 4,
        };
        assert_eq!(devices.assign(40).unwrap().micro_batches(), [4, 2, 4]);
        assert_eq!(devices.assign(12).unwrap().micro_batches(), [1, 1, 1]);
        assert!(devices.assign(8).is_err() && devices.assign(41).is_err());
    }
}
