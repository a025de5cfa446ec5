//! The gradient of the step before, for batches of one micro-batch.

use std::ops::Range;

use crate::element::Element;

/// This rank's part of the summed gradient of the step before, for batches of one micro-batch.
#[derive(Debug)]
pub(super) struct Previous {
    shards: Vec<Vec<Kept>>,
    pub(super) samples: u64,
    pub(super) weight: f64,
    /// Whether what is kept is one step's gradient, whole.
    pub(super) valid: bool,
}

#[derive(Debug)]
struct Kept {
    range: Range<usize>,
    /// Loss scale taken out.
    gradient: Vec<f32>,
    /// Written in the current step.
    fresh: bool,
}

impl Previous {
    pub(super) fn new(shards: usize) -> Self {
        Self {
            shards: (0..shards).map(|_| Vec::new()).collect(),
            samples: 0,
            weight: 0.0,
            valid: false,
        }
    }

    /// Puts `part` in the place of what was kept of the step before; returns that one's squared norm and the dot product
    /// of both over the `counted` runs (zero where nothing was kept).
    pub(super) fn exchange<G: Element>(
        &mut self,
        shard: usize,
        range: &Range<usize>,
        part: &[G],
        counted: &[Range<usize>],
        loss_scale: f64,
    ) -> (f64, f64) {
        let kept = &mut self.shards[shard];
        let (mut norm_sq, mut dot) = (0.0, 0.0);
        let place = if let Some(i) = kept.iter().position(|k| k.range == *range) {
            for run in counted {
                for (old, new) in kept[i].gradient[run.clone()].iter().zip(&part[run.clone()]) {
                    norm_sq += f64::from(*old) * f64::from(*old);
                    dot += f64::from(*old) * new.to_f64() / loss_scale;
                }
            }
            &mut kept[i]
        } else {
            // The layout of the parts changed, or this is the first step.
            self.valid = false;
            kept.push(Kept {
                range: range.clone(),
                gradient: vec![0.0; part.len()],
                fresh: false,
            });
            let last = kept.len() - 1;
            &mut kept[last]
        };
        for (old, new) in place.gradient.iter_mut().zip(part) {
            *old = (new.to_f64() / loss_scale) as f32;
        }
        place.fresh = true;
        (norm_sq, dot)
    }

    /// Takes what was written in this step, of so many samples and with this weight, for the step before the next.
    pub(super) fn next_step(&mut self, samples: u64, weight: f64) {
        self.samples = samples;
        self.weight = weight;
        self.valid = true;
        for kept in &mut self.shards {
            kept.retain(|k| k.fresh);
            for k in kept {
                k.fresh = false;
            }
        }
    }
}
