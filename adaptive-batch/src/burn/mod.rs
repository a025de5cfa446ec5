//! The same measurement on Burn tensors, on the device that they live on (features `burn`, `wgpu`, `cuda`).
//!
//! On the CPU backend (flex) the slices of the tensors go through the passes of [`fused`](crate::fused) without a copy. On
//! CubeCL devices one kernel adds, squares and reduces in a single pass; its threads and workgroups keep compensated partial
//! sums, and the host adds up those of at most 1,024 workgroups in `f64`. Only they leave the device, and only when
//! [`DeviceNorm::read`] is called, so that a step's kernels can all be queued before the first wait.

#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;
mod flex;

use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::{DType, Tensor};

use crate::error::{Error, Result};

/// The operation behind this module, for each backend.
///
/// Both return the changed accumulator and partial sums of the gradient's squares as pairs (sum, compensation), `[n, 2]`.
#[backend_extension(Flex, Cube: cfg(any(feature = "wgpu", feature = "cuda")))]
pub trait MeasureBackend: Backend {
    /// `acc + weight * grad`, and the partial sums of |grad|^2.
    fn accumulate_and_measure(
        acc: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        weight: f32,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

/// A squared norm that is still on its device.
#[derive(Debug, Clone)]
#[must_use = "the norm is only known once it is read"]
pub struct DeviceNorm(Tensor<2>);

impl DeviceNorm {
    /// Waits for the device and adds up the partial sums.
    ///
    /// # Errors
    /// [`Error::Tensor`] if the device does not give them.
    pub fn read(self) -> Result<f64> {
        let unreadable = |e: &dyn std::fmt::Debug| Error::Tensor {
            reason: format!("{e:?}"),
        };
        let data = self.0.try_into_data().map_err(|e| unreadable(&e))?;
        let partials = data.as_slice::<f32>().map_err(|e| unreadable(&e))?;
        Ok(partials.iter().map(|&x| f64::from(x)).sum())
    }
}

/// Adds `weight * grad` into `acc` and measures |grad|^2 (without the weight), in one pass on the tensors' device.
///
/// In place where `acc` is the only owner of its memory and contiguous, else in a copy. Computes in O(n). Relative error of
/// the norm: below 1e-14 on flex (it returns a pair of `f32`), below 1e-7 on CubeCL devices, whose threads have no `f64` to square in.
///
/// # Errors
/// [`Error::Tensor`] unless both are `f32` without autodiff, of one shape and on one device.
///
/// # Examples
/// ```
/// use adaptive_batch::burn::accumulate_and_measure;
/// use burn::tensor::{Device, Tensor};
/// let device = Device::flex();
/// let acc = Tensor::<1>::from_floats([1.0, 1.0], &device);
/// let grad = Tensor::<1>::from_floats([3.0, 4.0], &device);
/// let (acc, norm) = accumulate_and_measure(acc, grad, 0.5)?;
/// assert_eq!(norm.read()?, 25.0);
/// assert_eq!(acc.into_data().try_to_vec::<f32>().unwrap(), [2.5, 3.0]);
/// # Ok::<(), adaptive_batch::Error>(())
/// ```
pub fn accumulate_and_measure<const D: usize>(
    acc: Tensor<D>,
    grad: Tensor<D>,
    weight: f64,
) -> Result<(Tensor<D>, DeviceNorm)> {
    check(&acc, &grad)?;
    let (acc, partials) =
        Dispatch::accumulate_and_measure(acc.into_dispatch(), grad.into_dispatch(), weight as f32);
    Ok((
        Tensor::from_dispatch(acc),
        DeviceNorm(Tensor::from_dispatch(partials)),
    ))
}

fn check<const D: usize>(acc: &Tensor<D>, grad: &Tensor<D>) -> Result<()> {
    let refuse = |reason: String| Err(Error::Tensor { reason });
    for (name, tensor) in [("accumulator", acc), ("gradient", grad)] {
        if tensor.dtype() != DType::F32 {
            return refuse(format!("the {name} is {:?}, expected F32", tensor.dtype()));
        }
        if tensor.device().is_autodiff() {
            return refuse(format!(
                "the {name} is tracked by autodiff, expected its inner tensor"
            ));
        }
    }
    if acc.dims() != grad.dims() {
        return refuse(format!(
            "the gradient has shape {:?}, expected the accumulator's {:?}",
            grad.dims(),
            acc.dims()
        ));
    }
    if acc.device() != grad.device() {
        return refuse(format!(
            "the gradient is on {:?}, expected the accumulator's {:?}",
            grad.device(),
            acc.device()
        ));
    }
    Ok(())
}
