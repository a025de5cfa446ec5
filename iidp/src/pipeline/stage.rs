//! What a stage computes.

use burn::module::{Module, ModuleDisplay};
use burn::tensor::{Device, Tensor, TensorData};

use super::Message;
use crate::bucket::HostSlice;
use crate::tensor_parallel::TensorParallel;
use crate::{BoxError, Error, MicroBatch, ShardSpec};

/// A floating-point tensor of any rank: what blocks hand on.
///
/// Token ids travel as floats too, exactly up to 2^24.
///
/// # Examples
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use iidp::pipeline::Activation;
///
/// let x = Activation::new(Tensor::<2>::ones([2, 3], &Device::flex()));
/// assert_eq!(x.shape(), [2, 3]);
/// assert!(x.clone().into_tensor::<3>().is_err());
/// assert_eq!(x.into_tensor::<2>()?.dims(), [2, 3]);
/// # Ok::<(), iidp::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Activation {
    flat: Tensor<1>,
    shape: Vec<usize>,
}

impl Activation {
    /// Takes a tensor.
    pub fn new<const D: usize>(tensor: Tensor<D>) -> Self {
        let shape = tensor.dims().to_vec();
        let len: usize = shape.iter().product();
        Self {
            flat: tensor.reshape([len]),
            shape,
        }
    }

    /// Shape of the tensor.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The device of the tensor.
    pub fn device(&self) -> Device {
        self.flat.device()
    }

    /// Gives the tensor back.
    ///
    /// # Errors
    ///
    /// [`Error::LengthMismatch`] if it does not have `D` dimensions.
    pub fn into_tensor<const D: usize>(self) -> Result<Tensor<D>, Error> {
        let shape: [usize; D] =
            self.shape
                .as_slice()
                .try_into()
                .map_err(|_| Error::LengthMismatch {
                    what: format!("shape {:?} of an activation", self.shape),
                    got: self.shape.len(),
                    expected: D,
                })?;
        Ok(self.flat.reshape(shape))
    }

    /// The elements as one row, tracked if the tensor is.
    pub(crate) fn into_flat(self) -> Tensor<1> {
        self.flat
    }

    pub(crate) fn flat(&self) -> &Tensor<1> {
        &self.flat
    }

    /// A leaf of a new graph on `device`.
    pub(crate) fn receive(message: Message, device: &Device) -> Self {
        let flat = flat(message.values, device);
        Self {
            flat: if flat.is_autodiff() {
                flat.require_grad()
            } else {
                flat
            },
            shape: message.shape,
        }
    }
}

/// A row of numbers on a device.
pub(crate) fn flat(values: Vec<f32>, device: &Device) -> Tensor<1> {
    let len = values.len();
    Tensor::from_data(TensorData::new(values, [len]), device)
}

/// The elements of a tensor, without its graph.
pub(crate) fn host_values(tensor: Tensor<1>) -> Vec<f32> {
    let plain = if tensor.is_autodiff() {
        tensor.inner()
    } else {
        tensor
    };
    HostSlice::of(plain).as_slice().to_vec()
}

/// What a block may look at besides its input and its weights.
#[derive(Debug, Clone, Copy)]
pub struct StageContext<'a> {
    /// The samples, the step, the seeds.
    pub batch: MicroBatch<'a>,
    /// The ranks that share the block.
    pub group: &'a TensorParallel,
}

/// A part of a model that turns an activation into another: a block, a chain of blocks, a stage.
///
/// In `forward` it must use nothing but its arguments and its own weights; all ranks of the tensor-parallel group call it with the same
/// input (their own tokens of it, if the group is sequence-parallel and the blocks agree on that) and must hand on the same output.
pub trait StageModule: Module + ModuleDisplay + 'static {
    /// The output for an input.
    ///
    /// # Errors
    ///
    /// Whatever keeps it from being computed; the step is then given up on every rank.
    fn forward(&self, x: Activation, context: &StageContext<'_>) -> Result<Activation, BoxError>;

    /// How parameters are cut over tensor-parallel ranks, by their paths inside this module (names of fields and indices, joined by dots; variants of an enum do not count). Those not
    /// named are replicated.
    fn shard_specs(&self) -> Vec<(String, ShardSpec)> {
        Vec::new()
    }
}

/// Blocks one after the other.
///
/// A model of blocks of several kinds has an enum for `B`; see [`models`](crate::models) for some, and `examples/custom_block.rs`
/// for one of your own.
///
/// # Examples
///
/// ```
/// use burn::module::{Module, ModuleDisplay};
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Device, Tensor, activation};
/// use iidp::pipeline::{Activation, Sequential, StageContext, StageModule};
/// use iidp::tensor_parallel::TensorParallel;
/// use iidp::{BoxError, MicroBatch, Mode};
///
/// #[derive(Module, Debug)]
/// struct Dense {
///     linear: Linear,
/// }
///
/// impl StageModule for Dense {
///     fn forward(&self, x: Activation, _: &StageContext<'_>) -> Result<Activation, BoxError> {
///         Ok(Activation::new(activation::tanh(self.linear.forward(x.into_tensor::<2>()?))))
///     }
/// }
///
/// let device = Device::flex();
/// let dense = |from, to| Dense { linear: LinearConfig::new(from, to).init(&device) };
/// let model = Sequential::new(vec![dense(4, 8), dense(8, 2)]);
/// let batch = MicroBatch::new(&[0], Mode::Evaluate);
/// let context = StageContext { batch, group: &TensorParallel::alone() };
/// let y = model.forward(Activation::new(Tensor::<2>::ones([1, 4], &device)), &context)?;
/// assert_eq!(y.shape(), [1, 2]);
/// # Ok::<(), iidp::BoxError>(())
/// ```
#[derive(Module, Debug)]
pub struct Sequential<B: Module> {
    blocks: Vec<B>,
}

impl<B: Module> Sequential<B> {
    /// The given blocks, the first one first.
    pub const fn new(blocks: Vec<B>) -> Self {
        Self { blocks }
    }

    /// The blocks in their order.
    pub fn blocks(&self) -> &[B] {
        &self.blocks
    }
}

impl<B: StageModule> StageModule for Sequential<B> {
    fn forward(&self, x: Activation, context: &StageContext<'_>) -> Result<Activation, BoxError> {
        self.blocks
            .iter()
            .try_fold(x, |x, block| block.forward(x, context))
    }

    fn shard_specs(&self) -> Vec<(String, ShardSpec)> {
        (self.blocks.iter().enumerate())
            .flat_map(|(index, block)| {
                crate::tensor_parallel::nested(&format!("blocks.{index}"), block.shard_specs())
            })
            .collect()
    }
}
