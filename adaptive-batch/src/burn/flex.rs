//! The CPU backend: slices of the tensors' own memory.

use burn::backend::Flex;
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::tensor::TensorData;

use super::MeasureBackend;
use crate::fused;

impl MeasureBackend for Flex {
    fn accumulate_and_measure(
        acc: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        weight: f32,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (mut acc, grad) = (acc.to_contiguous(), grad.to_contiguous());
        let (start, len) = (acc.layout().start_offset(), acc.layout().num_elements());
        let grad_start = grad.layout().start_offset();
        let slice = &grad.storage::<f32>()[grad_start..grad_start + len];
        // Copies only if someone else holds the accumulator's memory too.
        let target = &mut acc.storage_mut::<f32>()[start..start + len];
        // Shapes were compared before, so the lengths agree.
        let norm_sq = fused::accumulate_scaled_and_measure(target, slice, f64::from(weight))
            .unwrap_or(f64::NAN);
        // Two f32 carry 48 bits of the f64.
        let high = norm_sq as f32;
        let low = if high.is_finite() {
            (norm_sq - f64::from(high)) as f32
        } else {
            0.0
        };
        let partials = TensorData::new(vec![high, low], [1, 2]);
        (acc, Self::float_from_data(partials, &Default::default()))
    }
}
