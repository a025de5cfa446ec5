//! Fixed orders of the passes on one device.

use super::{Pass, Pipeline};
use crate::training::Schedule;

/// One entry of a device's order.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step {
    pub(super) pass: Pass,
    pub(super) stage: usize,
    pub(super) micro_batch: usize,
}

/// The passes of `device` in order. Zero-bubble schedules get 1F1B's order with the weight gradient directly after the
/// gradient of the input.
pub(super) fn steps(pipeline: &Pipeline, schedule: Schedule, device: usize) -> Vec<Step> {
    let (p, v, m) = (pipeline.devices, pipeline.chunks, pipeline.micro_batches);
    let total = m * v;
    let warm_up = match schedule {
        Schedule::GPipe => total,
        _ => warm_up(p, v, device, m),
    };
    let split = super::splits_backward(schedule);
    let mut steps = Vec::with_capacity(total * if split { 3 } else { 2 });
    let forward = |k: usize| {
        let (chunk, micro_batch) = place(p, v, k);
        Step {
            pass: Pass::Forward,
            stage: chunk * p + device,
            micro_batch,
        }
    };
    let backward = |steps: &mut Vec<Step>, k: usize| {
        let (chunk, micro_batch) = place(p, v, k);
        let stage = (v - 1 - chunk) * p + device;
        let mut push = |pass| {
            steps.push(Step {
                pass,
                stage,
                micro_batch,
            });
        };
        push(Pass::Backward);
        if split {
            push(Pass::Weight);
        }
    };
    for k in 0..total + warm_up {
        if k < total {
            steps.push(forward(k));
        }
        if k >= warm_up {
            backward(&mut steps, k - warm_up);
        }
    }
    steps
}

/// Forward passes before the first backward pass follows one.
///
/// Narayanan et al. 2021, section 2.2: the later a stage, the fewer. With chunks each device also waits for the others
/// between chunks; if there is one group of micro-batches only, everything is warm-up.
pub(super) fn warm_up(devices: usize, chunks: usize, device: usize, micro_batches: usize) -> usize {
    let total = micro_batches * chunks;
    if chunks == 1 {
        total.min(devices - 1 - device)
    } else {
        total.min(2 * (devices - 1 - device) + (chunks - 1) * devices)
    }
}

/// Chunk and micro-batch of the k-th forward pass: chunk by chunk over groups of as many micro-batches as devices.
fn place(devices: usize, chunks: usize, k: usize) -> (usize, usize) {
    if chunks == 1 {
        return (0, k);
    }
    let group = k / (devices * chunks);
    let within = k % (devices * chunks);
    (within / devices, group * devices + within % devices)
}
