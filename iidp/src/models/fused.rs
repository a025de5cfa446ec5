//! Differentiable operations of the [`Gpt`](super::Gpt) that are one kernel each on the flex backend: GELU, layer norm, causal attention.
//!
//! Composed of Burn's own operations they take a pass over memory, and a tensor, per step of their formula, forward and backward. On other
//! devices they are composed.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, backend_extension};
use burn::nn::LayerNorm;
use burn::tensor::{Bool, DType, Device, Tensor, TensorData, activation};

use super::kernels::{self, AttentionShape};

/// Number of heads, in the form that the extension's dispatch can pass on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Heads(usize);

/// Added to the variance, in the form that the extension's dispatch can pass on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Epsilon(f32);

/// The fused operations as a backend extension.
#[backend_extension(Flex, Autodiff)]
pub(super) trait FusedOps: Backend {
    fn fused_gelu(x: FloatTensor<Self>) -> FloatTensor<Self>;

    fn fused_layer_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        epsilon: Epsilon,
    ) -> FloatTensor<Self>;

    fn fused_attention(qkv: FloatTensor<Self>, heads: Heads) -> FloatTensor<Self>;
}

/// The kernels that the operations and their gradients consist of.
pub(super) trait FusedKernels: Backend {
    fn gelu_gradient(x: FloatTensor<Self>, g: FloatTensor<Self>) -> FloatTensor<Self>;

    /// For `x`, `gamma` and `beta`.
    fn layer_norm_gradient(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        g: FloatTensor<Self>,
        epsilon: Epsilon,
    ) -> [FloatTensor<Self>; 3];

    /// The output and the weights.
    fn attention_with_weights(
        qkv: FloatTensor<Self>,
        heads: Heads,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    fn attention_gradient(
        qkv: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        g: FloatTensor<Self>,
        heads: Heads,
    ) -> FloatTensor<Self>;
}

fn contiguous(tensor: FlexTensor) -> FlexTensor {
    if tensor.is_contiguous() {
        tensor
    } else {
        tensor.to_contiguous()
    }
}

fn values(tensor: &FlexTensor) -> &[f32] {
    let start = tensor.layout().start_offset();
    &tensor.storage::<f32>()[start..start + tensor.layout().num_elements()]
}

fn tensor(values: Vec<f32>, shape: &[usize]) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(values, shape.to_vec()))
}

fn shape_of(tensor: &FlexTensor) -> Vec<usize> {
    tensor.layout().shape().iter().copied().collect()
}

fn attention_shape(qkv: &FlexTensor, heads: Heads) -> AttentionShape {
    let shape = shape_of(qkv);
    AttentionShape {
        samples: shape[0],
        tokens: shape[1],
        heads: heads.0,
        head_width: shape[2] / 3 / heads.0,
    }
}

impl FusedOps for Flex {
    fn fused_gelu(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let x = contiguous(x);
        tensor(kernels::gelu(values(&x)), &shape_of(&x))
    }

    fn fused_layer_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        epsilon: Epsilon,
    ) -> FloatTensor<Self> {
        let (x, gamma, beta) = (contiguous(x), contiguous(gamma), contiguous(beta));
        tensor(
            kernels::layer_norm(values(&x), values(&gamma), values(&beta), epsilon.0),
            &shape_of(&x),
        )
    }

    fn fused_attention(qkv: FloatTensor<Self>, heads: Heads) -> FloatTensor<Self> {
        Self::attention_with_weights(qkv, heads).0
    }
}

impl FusedKernels for Flex {
    fn gelu_gradient(x: FloatTensor<Self>, g: FloatTensor<Self>) -> FloatTensor<Self> {
        let (x, g) = (contiguous(x), contiguous(g));
        tensor(
            kernels::gelu_gradient(values(&x), values(&g)),
            &shape_of(&x),
        )
    }

    fn layer_norm_gradient(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        g: FloatTensor<Self>,
        epsilon: Epsilon,
    ) -> [FloatTensor<Self>; 3] {
        let (x, gamma, g) = (contiguous(x), contiguous(gamma), contiguous(g));
        let [for_x, for_gamma, for_beta] =
            kernels::layer_norm_gradient(values(&x), values(&gamma), values(&g), epsilon.0);
        [
            tensor(for_x, &shape_of(&x)),
            tensor(for_gamma, &shape_of(&gamma)),
            tensor(for_beta, &shape_of(&gamma)),
        ]
    }

    fn attention_with_weights(
        qkv: FloatTensor<Self>,
        heads: Heads,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let qkv = contiguous(qkv);
        let shape = attention_shape(&qkv, heads);
        let AttentionShape {
            samples,
            tokens,
            heads,
            head_width,
        } = shape;
        let (out, weights) = kernels::attention(values(&qkv), shape);
        (
            tensor(out, &[samples, tokens, heads * head_width]),
            tensor(weights, &[samples, heads, tokens, tokens]),
        )
    }

    fn attention_gradient(
        qkv: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        g: FloatTensor<Self>,
        heads: Heads,
    ) -> FloatTensor<Self> {
        let (qkv, weights, g) = (contiguous(qkv), contiguous(weights), contiguous(g));
        let shape = attention_shape(&qkv, heads);
        tensor(
            kernels::attention_gradient(values(&qkv), values(&weights), values(&g), shape),
            &shape_of(&qkv),
        )
    }
}

impl<B: FusedOps + FusedKernels, C: CheckpointStrategy> FusedOps for Autodiff<B, C> {
    fn fused_gelu(x: FloatTensor<Self>) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Gelu;
        impl<B: FusedKernels> Backward<B, 1> for Gelu {
            type State = FloatTensor<B>;

            fn backward(
                self,
                ops: Ops<Self::State, 1>,
                grads: &mut Gradients,
                _: &mut Checkpointer,
            ) {
                let [parent] = ops.parents;
                let g = grads.consume::<B>(&ops.node);
                if let Some(parent) = parent {
                    grads.register::<B>(parent.id, B::gelu_gradient(ops.state, g));
                }
            }
        }
        let (x, node) = x.into_parts();
        match Gelu.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(x.clone(), B::fused_gelu(x)),
            OpsKind::UnTracked(prep) => prep.finish(B::fused_gelu(x)),
        }
    }

    fn fused_layer_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        epsilon: Epsilon,
    ) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Norm;
        impl<B: FusedKernels> Backward<B, 3> for Norm {
            type State = (FloatTensor<B>, FloatTensor<B>, Epsilon);

            fn backward(
                self,
                ops: Ops<Self::State, 3>,
                grads: &mut Gradients,
                _: &mut Checkpointer,
            ) {
                let g = grads.consume::<B>(&ops.node);
                let (x, gamma, epsilon) = ops.state;
                let gradients = B::layer_norm_gradient(x, gamma, g, epsilon);
                for (parent, gradient) in ops.parents.into_iter().zip(gradients) {
                    if let Some(parent) = parent {
                        grads.register::<B>(parent.id, gradient);
                    }
                }
            }
        }
        let ((x, x_node), (gamma, gamma_node), (beta, beta_node)) =
            (x.into_parts(), gamma.into_parts(), beta.into_parts());
        match Norm
            .prepare::<C>([x_node, gamma_node, beta_node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => prep.finish(
                (x.clone(), gamma.clone(), epsilon),
                B::fused_layer_norm(x, gamma, beta, epsilon),
            ),
            OpsKind::UnTracked(prep) => prep.finish(B::fused_layer_norm(x, gamma, beta, epsilon)),
        }
    }

    fn fused_attention(qkv: FloatTensor<Self>, heads: Heads) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Attention;
        impl<B: FusedKernels> Backward<B, 1> for Attention {
            type State = (FloatTensor<B>, FloatTensor<B>, Heads);

            fn backward(
                self,
                ops: Ops<Self::State, 1>,
                grads: &mut Gradients,
                _: &mut Checkpointer,
            ) {
                let [parent] = ops.parents;
                let g = grads.consume::<B>(&ops.node);
                let (qkv, weights, heads) = ops.state;
                if let Some(parent) = parent {
                    grads.register::<B>(parent.id, B::attention_gradient(qkv, weights, g, heads));
                }
            }
        }
        let (qkv, node) = qkv.into_parts();
        match Attention.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let (out, weights) = B::attention_with_weights(qkv.clone(), heads);
                prep.finish((qkv, weights, heads), out)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::fused_attention(qkv, heads)),
        }
    }
}

/// Whether `x` is where the fused kernels are.
fn on_flex<const D: usize>(x: &Tensor<D>) -> bool {
    x.dtype() == DType::F32 && x.device().inner() == Device::flex()
}

/// `x cdf(x)`.
pub(super) fn gelu<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    if on_flex(&x) {
        Tensor::from_dispatch(Dispatch::fused_gelu(x.into_dispatch()))
    } else {
        activation::gelu(x)
    }
}

/// `norm` over the last dimension.
pub(super) fn layer_norm<const D: usize>(
    norm: &LayerNorm,
    epsilon: f32,
    x: Tensor<D>,
) -> Tensor<D> {
    match &norm.beta {
        Some(beta) if on_flex(&x) => Tensor::from_dispatch(Dispatch::fused_layer_norm(
            x.into_dispatch(),
            norm.gamma.val().into_dispatch(),
            beta.val().into_dispatch(),
            Epsilon(epsilon),
        )),
        _ => norm.forward(x),
    }
}

/// Causal self-attention of `[samples, tokens, 3 x width]` (queries, keys, values), giving `[samples, tokens, width]`.
pub(super) fn attention(qkv: Tensor<3>, heads: usize) -> Tensor<3> {
    let [samples, tokens, triple] = qkv.dims();
    let width = triple / 3;
    let head_width = width / heads;
    if on_flex(&qkv) && AttentionShape::supported(head_width) {
        return Tensor::from_dispatch(Dispatch::fused_attention(qkv.into_dispatch(), Heads(heads)));
    }
    composed_attention(&qkv, [samples, tokens, heads, head_width])
}

fn composed_attention(
    qkv: &Tensor<3>,
    [samples, tokens, heads, head_width]: [usize; 4],
) -> Tensor<3> {
    let width = heads * head_width;
    let future = Tensor::<2, Bool>::tril_mask([tokens, tokens], 0, &qkv.device()).unsqueeze::<4>();
    let part = |index: usize| -> Tensor<4> {
        qkv.clone()
            .slice([0..samples, 0..tokens, index * width..(index + 1) * width])
            .reshape([samples, tokens, heads, head_width])
            .swap_dims(1, 2)
    };
    // Scaling the queries costs less than scaling the scores.
    let (query, key, value) = (
        part(0).mul_scalar((head_width as f32).sqrt().recip()),
        part(1),
        part(2),
    );
    let scores = query.matmul(key.swap_dims(2, 3));
    let weights = activation::softmax(scores.mask_fill(future, f32::NEG_INFINITY), 3);
    weights
        .matmul(value)
        .swap_dims(1, 2)
        .reshape([samples, tokens, width])
}

#[cfg(test)]
mod tests {
    use burn::module::Param;
    use burn::nn::LayerNormConfig;
    use burn::tensor::Distribution;

    use super::*;

    fn random<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
        Tensor::random(shape, Distribution::Normal(0.0, 1.0), device)
    }

    fn assert_close<const D: usize>(what: &str, got: &Tensor<D>, expected: &Tensor<D>) {
        let difference: f32 = (got.clone() - expected.clone()).abs().max().into_scalar();
        let size: f32 = expected.clone().abs().max().into_scalar();
        assert!(
            difference <= 2e-6 * size.max(1.0),
            "{what}: off by {difference} of {size}"
        );
    }

    /// Both forms on the same leaf, with the same gradient coming in.
    fn compare<const D: usize>(
        what: &str,
        x: &Tensor<D>,
        fused: impl Fn(Tensor<D>) -> Tensor<D>,
        composed: impl Fn(Tensor<D>) -> Tensor<D>,
    ) {
        let run = |f: &dyn Fn(Tensor<D>) -> Tensor<D>, weight: Option<Tensor<D>>| {
            let leaf = Tensor::from_inner(x.clone()).require_grad();
            let y = f(leaf.clone());
            let weight = weight.unwrap_or_else(|| random(y.dims(), &Device::flex()));
            let gradients = (y.clone() * Tensor::from_inner(weight.clone()))
                .sum()
                .backward();
            (
                y.inner(),
                leaf.grad(&gradients).expect("the leaf is used"),
                weight,
            )
        };
        let (y, g, weight) = run(&fused, None);
        let (expected_y, expected_g, _) = run(&composed, Some(weight));
        assert_close(&format!("{what} value"), &y, &expected_y);
        assert_close(&format!("{what} gradient"), &g, &expected_g);
    }

    #[test]
    fn fused_gelu_equals_burns() {
        let x = random([33, 517], &Device::flex()) * 3.0;
        compare("gelu", &x, gelu, activation::gelu);
    }

    #[test]
    fn fused_layer_norm_equals_burns() {
        let device = Device::flex();
        let epsilon = 1e-5;
        for width in [7, 64, 130] {
            let mut norm = LayerNormConfig::new(width)
                .with_epsilon(f64::from(epsilon))
                .init(&device.clone().autodiff());
            norm.gamma = Param::from_tensor(Tensor::from_inner(random([width], &device)));
            norm.beta = Some(Param::from_tensor(Tensor::from_inner(random(
                [width],
                &device,
            ))));
            let x = random([3, 150, width], &device) * 2.0 + 0.5;
            compare(
                "layer norm",
                &x,
                |x| layer_norm(&norm, epsilon, x),
                |x| norm.forward(x),
            );
            // The gradients of the weights.
            let weight = Tensor::from_inner(random([3, 150, width], &device));
            let of_weights = |y: Tensor<3>| {
                let gradients = (y * weight.clone()).sum().backward();
                let beta = norm.beta.as_ref().expect("made above").val();
                (
                    norm.gamma.val().grad(&gradients).expect("used"),
                    beta.grad(&gradients).expect("used"),
                )
            };
            let fused = of_weights(layer_norm(&norm, epsilon, Tensor::from_inner(x.clone())));
            let composed = of_weights(norm.forward(Tensor::from_inner(x)));
            assert_close("gamma", &fused.0, &composed.0);
            assert_close("beta", &fused.1, &composed.1);
        }
    }

    #[test]
    fn fused_attention_equals_the_composed_one() {
        for (samples, tokens, heads, head_width) in
            [(2, 9, 3, 16), (1, 1, 1, 16), (3, 33, 2, 32), (1, 20, 1, 64)]
        {
            let qkv = random([samples, tokens, 3 * heads * head_width], &Device::flex());
            compare(
                "attention",
                &qkv,
                |x| attention(x, heads),
                |x| composed_attention(&x, [samples, tokens, heads, head_width]),
            );
        }
    }
}
