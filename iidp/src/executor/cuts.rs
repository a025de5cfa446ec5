//! Places at which the graph of a loss is cut, so that gradients come out part by part.

use std::cell::RefCell;
use std::fmt;

use burn::tensor::{Gradients, Tensor};

/// Runs the backward pass of one segment, given the gradients of the segment after it.
type Segment = Box<dyn FnOnce(&mut Gradients) -> Option<Gradients>>;

/// Cuts the graph of a loss into segments whose backward passes run one after the other, from the loss to the inputs.
///
/// Burn gives out gradients when a whole backward pass is over. Where a model cuts its activations, say between blocks, the gradients of
/// the last block are there while those of the first are still to be computed, and their all-reduce runs meanwhile. The
/// gradients are the same, bit for bit.
pub(crate) struct Cuts {
    segments: RefCell<Vec<Segment>>,
    active: bool,
}

impl fmt::Debug for Cuts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cuts")
            .field("segments", &self.segments.borrow().len())
            .field("active", &self.active)
            .finish()
    }
}

impl Cuts {
    /// Cuts only if `active`.
    pub(crate) fn new(active: bool) -> Self {
        Self {
            segments: RefCell::default(),
            active,
        }
    }

    /// Cuts the graph at `x`. What comes later in the forward pass must use the returned tensor in place of `x`, and
    /// nothing else that was computed before the cut except parameters.
    pub(crate) fn cut<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        if !self.active || !x.is_tracked() {
            return x;
        }
        let leaf = Tensor::from_inner(x.clone().inner()).require_grad();
        let entry = leaf.clone();
        self.segments.borrow_mut().push(Box::new(move |gradients| {
            let gradient = entry.grad_remove(gradients)?;
            Some((x * Tensor::from_inner(gradient)).sum().backward())
        }));
        leaf
    }

    /// The backward pass of `loss`, in whose graph the cuts are.
    pub(crate) fn backward(self, loss: Tensor<1>) -> BackwardPass {
        BackwardPass {
            loss: Some(loss),
            earlier: self.segments.into_inner(),
            gradients: None,
        }
    }
}

/// A backward pass that goes from segment to segment, from the loss to the inputs.
pub(crate) struct BackwardPass {
    loss: Option<Tensor<1>>,
    /// Segments whose turn is yet to come, the next one last.
    earlier: Vec<Segment>,
    gradients: Option<Gradients>,
}

impl BackwardPass {
    /// Computes one segment and gives its gradients, from which the caller may take those of parameters. `None` after the last segment, or if the loss
    /// does not depend on what came before a cut.
    pub(crate) fn next_segment(&mut self) -> Option<&mut Gradients> {
        let gradients = if let Some(loss) = self.loss.take() {
            loss.backward()
        } else {
            let mut later = self.gradients.take()?;
            self.earlier.pop()?(&mut later)?
        };
        Some(self.gradients.insert(gradients))
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Distribution};

    use super::*;

    #[test]
    fn gradients_of_a_cut_graph_are_those_of_the_whole() {
        let device = Device::flex();
        let weights: Vec<Tensor<2>> = (0..3)
            .map(|_| {
                let values = Tensor::random([5, 5], Distribution::Normal(0.0, 1.0), &device);
                Tensor::from_inner(values).require_grad()
            })
            .collect();
        let x = Tensor::from_inner(Tensor::<2>::random(
            [4, 5],
            Distribution::Normal(0.0, 1.0),
            &device,
        ));
        let run = |active: bool| {
            let cuts = Cuts::new(active);
            let mut h = x.clone();
            for weight in &weights {
                h = cuts.cut(h.matmul(weight.clone()).tanh());
            }
            let loss = h.powi_scalar(2).mean();
            let mut found = vec![None; 3];
            let mut segments = 0;
            let mut pass = cuts.backward(loss);
            while let Some(gradients) = pass.next_segment() {
                for (weight, found) in weights.iter().zip(&mut found) {
                    if let Some(gradient) = weight.grad_remove(gradients) {
                        *found = Some((segments, gradient.into_data()));
                    }
                }
                segments += 1;
            }
            (segments, found)
        };
        let (one, whole) = run(false);
        let (four, cut) = run(true);
        assert_eq!((one, four), (1, 4));
        for (weight, (whole, cut)) in whole.into_iter().zip(cut).enumerate() {
            let (whole, cut) = (whole.unwrap(), cut.unwrap());
            assert_eq!(
                cut.0,
                3 - weight,
                "the last weight's gradient comes first, after the cut behind it"
            );
            assert_eq!(whole.1, cut.1);
        }
    }
}
