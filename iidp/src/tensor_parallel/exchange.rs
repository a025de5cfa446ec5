//! The differentiable exchange among the ranks of a group, as an extension of Burn's backends.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, backend_extension};
use burn::tensor::{Tensor, TensorData};

use super::TensorParallel;

/// What happens to a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Transfer {
    /// Nothing.
    Keep,
    /// Sum over ranks.
    Sum,
    /// Largest element over ranks.
    Max,
    /// The ranks' tensors, one after the other along the first dimension.
    Gather,
    /// This rank's part of the first dimension of the sum over ranks.
    Scatter,
    /// This rank's part of the first dimension.
    Split,
}

/// What happens on the way forward, and to the gradient on the way back.
#[derive(Debug, Clone)]
pub(super) struct Exchange {
    pub(super) group: TensorParallel,
    pub(super) forward: Transfer,
    pub(super) backward: Transfer,
}

impl Exchange {
    fn reversed(self) -> Self {
        Self {
            forward: self.backward,
            backward: self.forward,
            ..self
        }
    }
}

#[backend_extension(Flex, Autodiff)]
pub(super) trait ExchangeOps: Backend {
    fn exchange(x: FloatTensor<Self>, exchange: Exchange) -> FloatTensor<Self>;
}

impl ExchangeOps for Flex {
    fn exchange(x: FloatTensor<Self>, exchange: Exchange) -> FloatTensor<Self> {
        let Exchange { group, forward, .. } = exchange;
        if forward == Transfer::Keep {
            return x;
        }
        let x = if x.is_contiguous() {
            x
        } else {
            x.to_contiguous()
        };
        let start = x.layout().start_offset();
        let mut shape: Vec<usize> = x.layout().shape().iter().copied().collect();
        let values = x.storage::<f32>()[start..start + x.layout().num_elements()].to_vec();
        match forward {
            Transfer::Gather => shape[0] *= group.size(),
            Transfer::Scatter | Transfer::Split => shape[0] /= group.size(),
            Transfer::Keep | Transfer::Sum | Transfer::Max => {}
        }
        FlexTensor::from_data(TensorData::new(group.transfer(forward, values), shape))
    }
}

impl<B: ExchangeOps, C: CheckpointStrategy> ExchangeOps for Autodiff<B, C> {
    fn exchange(x: FloatTensor<Self>, exchange: Exchange) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Reverse;

        impl<B: ExchangeOps> Backward<B, 1> for Reverse {
            type State = Exchange;

            fn backward(
                self,
                ops: Ops<Exchange, 1>,
                gradients: &mut Gradients,
                _: &mut Checkpointer,
            ) {
                let exchange = ops.state;
                unary::<B, _>(ops.parents, ops.node, gradients, |gradient| {
                    B::exchange(gradient, exchange)
                });
            }
        }

        let (x, node) = x.into_parts();
        let result = B::exchange(x, exchange.clone());
        match Reverse.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => prepared.finish(exchange.reversed(), result),
            OpsKind::UnTracked(prepared) => prepared.finish(result),
        }
    }
}

/// Exchanges a tensor, on any device that is flex underneath.
pub(super) fn exchange<const D: usize>(x: Tensor<D>, exchange: Exchange) -> Tensor<D> {
    Tensor::from_dispatch(Dispatch::exchange(x.into_dispatch(), exchange))
}
