//! The flat layout of a module's parameters, and the buckets in which gradients are accumulated and reduced.
//!
//! A [`ParameterLayout`] gives every trainable tensor of a Burn module a *slot* in one flat `f32` vector, in the
//! order in which the module visits them. Gradients, optimizer moments and parameters of a device are then
//! vectors of the same length, and a [`GradientBucket`] is a range of them that holds whole slots.
//!
//! * A **tied** tensor (one [`ParamId`] met at several places) has one slot; its gradient is the sum over its places.
//! * A **frozen** tensor (no gradient asked for) has no slot; it is a *buffer*, as the running statistics of
//!   a batch norm are. Buffers that change in a forward pass are averaged over the micro-batches.
//! * A tensor that a step does not use contributes a gradient of zero.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Device, Gradients, Tensor, TensorData};

use crate::Error;

/// Where one tensor of the module lies in the flat vector.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParameterSlot {
    /// Path inside the module, such as `blocks.0.fc1.weight`.
    pub path: String,
    /// Shape of the tensor.
    pub shape: Vec<usize>,
    /// First element in the flat vector.
    pub offset: usize,
    /// Number of elements.
    pub len: usize,
    /// Burn's identity of the parameter.
    pub id: ParamId,
    /// How many places of the module hold this tensor: more than one when it is tied.
    pub uses: usize,
}

impl ParameterSlot {
    /// The elements of the flat vector that belong to this tensor.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len
    }
}

/// A contiguous part of the flat gradient that is reduced in one collective. It holds whole slots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GradientBucket {
    /// Position among the buckets.
    pub index: usize,
    /// Elements of the flat vector.
    pub range: Range<usize>,
    /// Slots that lie in it.
    pub slots: Range<usize>,
}

/// The flat layout of a module: slots of trainable tensors, slots of buffers, and buckets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParameterLayout {
    slots: Vec<ParameterSlot>,
    by_id: BTreeMap<ParamId, usize>,
    len: usize,
    buffers: Vec<ParameterSlot>,
    buffer_by_id: BTreeMap<ParamId, usize>,
    buffer_len: usize,
    buckets: Vec<GradientBucket>,
}

impl ParameterLayout {
    /// Reads the layout of `module`, which must live on an autodiff device, and cuts it into buckets of about
    /// `bucket_bytes` bytes (a larger tensor gets a bucket of its own).
    ///
    /// Computes in O(number of tensors).
    ///
    /// # Errors
    ///
    /// [`Error::UnsupportedDType`] for a floating-point tensor that is not `f32`, and
    /// [`Error::NoTrainableParameters`] if there is nothing to train.
    pub fn of<M: Module>(module: &M, bucket_bytes: usize) -> Result<Self, Error> {
        let mut builder = LayoutBuilder::default();
        module.visit(&mut builder);
        if let Some((path, dtype)) = builder.unsupported {
            return Err(Error::UnsupportedDType {
                path,
                dtype: format!("{dtype:?}"),
            });
        }
        if builder.trainable.slots.is_empty() {
            return Err(Error::NoTrainableParameters);
        }
        let buckets = cut_into_buckets(&builder.trainable.slots, bucket_bytes);
        Ok(Self {
            slots: builder.trainable.slots,
            by_id: builder.trainable.by_id,
            len: builder.trainable.len,
            buffers: builder.buffers.slots,
            buffer_by_id: builder.buffers.by_id,
            buffer_len: builder.buffers.len,
            buckets,
        })
    }

    /// Number of trainable elements: the length of the flat vector.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is nothing to train. A layout that was read from a module never is.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of elements in buffers (frozen tensors, running statistics).
    pub fn buffer_len(&self) -> usize {
        self.buffer_len
    }

    /// Slots of the trainable tensors, by offset.
    pub fn slots(&self) -> &[ParameterSlot] {
        &self.slots
    }

    /// Slots of the buffers, by offset in the flat vector of buffers.
    pub fn buffers(&self) -> &[ParameterSlot] {
        &self.buffers
    }

    /// Buckets, by offset.
    pub fn buckets(&self) -> &[GradientBucket] {
        &self.buckets
    }

    /// The trainable tensors of `module`, flattened.
    pub(crate) fn read_parameters<M: Module>(&self, module: &M) -> Vec<f32> {
        let mut out = vec![0.0; self.len];
        module.visit(&mut Reader {
            slots: &self.slots,
            by_id: &self.by_id,
            out: &mut out,
        });
        out
    }

    /// The buffers of `module`, flattened. Running statistics must have been synchronised (`Module::valid` does it).
    pub(crate) fn read_buffers<M: Module>(&self, module: &M) -> Vec<f32> {
        let mut out = vec![0.0; self.buffer_len];
        if self.buffer_len > 0 {
            module.visit(&mut Reader {
                slots: &self.buffers,
                by_id: &self.buffer_by_id,
                out: &mut out,
            });
        }
        out
    }

    /// Takes the gradients of `module` out of `gradients` and adds them to `to`, telling `met` of each slot that had one.
    /// Zero-copy on the flex backend.
    pub(crate) fn take_gradients<M: Module>(
        &self,
        module: &M,
        gradients: &mut Gradients,
        to: &mut FlatGradient,
        met: impl FnMut(usize),
    ) {
        module.visit(&mut TakeGradients {
            layout: self,
            gradients,
            out: to,
            met,
        });
    }

    /// Adds gradients of weights that were computed apart, by identity. Those of frozen weights are ignored.
    pub(crate) fn add_gradients(
        &self,
        gradient: &mut FlatGradient,
        parts: Vec<(ParamId, Tensor<2>)>,
    ) {
        for (id, part) in parts {
            if let Some(&i) = self.by_id.get(&id) {
                gradient.add(i, HostSlice::of(inner(part)));
            }
        }
    }

    fn slot_of(&self, id: ParamId) -> Option<(Place, &ParameterSlot)> {
        if let Some(&i) = self.by_id.get(&id) {
            return Some((Place::Trainable, &self.slots[i]));
        }
        self.buffer_by_id
            .get(&id)
            .map(|&i| (Place::Buffer, &self.buffers[i]))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Trainable,
    Buffer,
}

#[derive(Default)]
struct SlotList {
    slots: Vec<ParameterSlot>,
    by_id: BTreeMap<ParamId, usize>,
    len: usize,
}

impl SlotList {
    fn push(&mut self, id: ParamId, path: String, shape: Vec<usize>) {
        if let Some(&i) = self.by_id.get(&id) {
            self.slots[i].uses += 1;
            return;
        }
        let len = shape.iter().product();
        self.by_id.insert(id, self.slots.len());
        self.slots.push(ParameterSlot {
            path,
            shape,
            offset: self.len,
            len,
            id,
            uses: 1,
        });
        self.len += len;
    }
}

#[derive(Default)]
struct LayoutBuilder {
    path: Vec<String>,
    trainable: SlotList,
    buffers: SlotList,
    unsupported: Option<(String, DType)>,
}

impl ModuleVisitor for LayoutBuilder {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.base();
        let path = self.path.join(".");
        if value.dtype() != DType::F32 {
            self.unsupported.get_or_insert((path, value.dtype()));
            return;
        }
        let list = if value.is_require_grad() {
            &mut self.trainable
        } else {
            &mut self.buffers
        };
        list.push(param.id, path, value.dims().to_vec());
    }
}

fn cut_into_buckets(slots: &[ParameterSlot], bucket_bytes: usize) -> Vec<GradientBucket> {
    let limit = (bucket_bytes / size_of::<f32>()).max(1);
    let mut buckets: Vec<GradientBucket> = Vec::new();
    for (i, slot) in slots.iter().enumerate() {
        match buckets.last_mut() {
            Some(last) if last.range.len() + slot.len <= limit => {
                last.range.end += slot.len;
                last.slots.end += 1;
            }
            _ => buckets.push(GradientBucket {
                index: buckets.len(),
                range: slot.range(),
                slots: i..i + 1,
            }),
        }
    }
    buckets
}

struct Reader<'a> {
    slots: &'a [ParameterSlot],
    by_id: &'a BTreeMap<ParamId, usize>,
    out: &'a mut [f32],
}

impl ModuleVisitor for Reader<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(&i) = self.by_id.get(&param.id) {
            let values = HostSlice::of(inner(param.base()));
            self.out[self.slots[i].range()].copy_from_slice(values.as_slice());
        }
    }
}

/// The tensor without its gradient tracking.
fn inner<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    if tensor.is_autodiff() {
        tensor.inner()
    } else {
        tensor
    }
}

/// A tensor's values where the host can read them: the flex tensor itself, or a copy from another device.
#[derive(Debug)]
pub(crate) enum HostSlice {
    Flex(FlexTensor),
    Copy(Vec<f32>),
}

impl HostSlice {
    /// `tensor` must be `f32` and untracked.
    pub(crate) fn of<const D: usize>(tensor: Tensor<D>) -> Self {
        match tensor.clone().try_into_primitive::<Flex>() {
            Ok(primitive) => Self::Flex(if primitive.is_contiguous() {
                primitive
            } else {
                primitive.to_contiguous()
            }),
            Err(_) => Self::Copy(tensor.into_data().iter::<f32>().collect()),
        }
    }

    pub(crate) fn as_slice(&self) -> &[f32] {
        match self {
            Self::Flex(tensor) => {
                let start = tensor.layout().start_offset();
                &tensor.storage::<f32>()[start..start + tensor.layout().num_elements()]
            }
            Self::Copy(values) => values,
        }
    }
}

/// The gradient of one micro-batch, one entry per slot.
#[derive(Debug)]
pub(crate) struct FlatGradient {
    slots: Vec<Option<HostSlice>>,
}

impl FlatGradient {
    /// Nothing yet.
    pub(crate) fn empty(layout: &ParameterLayout) -> Self {
        Self {
            slots: layout.slots.iter().map(|_| None).collect(),
        }
    }

    /// The gradient of slot `slot`; `None` when the micro-batch did not use it.
    pub(crate) fn slot(&self, slot: usize) -> Option<&[f32]> {
        self.slots[slot].as_ref().map(HostSlice::as_slice)
    }

    /// Takes out the gradients of some slots.
    pub(crate) fn take_if(&mut self, wanted: impl Fn(usize) -> bool) -> Self {
        let take = |(slot, gradient): (usize, &mut Option<HostSlice>)| {
            if wanted(slot) { gradient.take() } else { None }
        };
        Self {
            slots: self.slots.iter_mut().enumerate().map(take).collect(),
        }
    }

    /// Adds to the gradient of a slot.
    fn add(&mut self, slot: usize, part: HostSlice) {
        self.slots[slot] = Some(match self.slots[slot].take() {
            None => part,
            Some(first) => HostSlice::Copy(
                first
                    .as_slice()
                    .iter()
                    .zip(part.as_slice())
                    .map(|(a, b)| a + b)
                    .collect(),
            ),
        });
    }
}

struct TakeGradients<'a, F> {
    layout: &'a ParameterLayout,
    gradients: &'a mut Gradients,
    out: &'a mut FlatGradient,
    met: F,
}

impl<F: FnMut(usize)> ModuleVisitor for TakeGradients<'_, F> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(&i) = self.layout.by_id.get(&param.id) else {
            return;
        };
        if let Some(gradient) = param.base().grad_remove(self.gradients) {
            (self.met)(i);
            // A tied tensor is several leaves in a replica, and may be met in several segments: its gradients add up.
            self.out.add(i, HostSlice::of(gradient));
        }
    }
}

/// The parameters of one device: one flat storage, of which the replicas' tensors are views.
///
/// On the flex backend the flat vector *is* the storage of every weight: [`Self::update`] writes into it in place
/// as soon as no replica holds a view, and [`Self::fill`] hands out views without copying. On other devices
/// the vector lives on the host and is uploaded once per update.
#[derive(Debug)]
pub(crate) struct ParameterStore {
    storage: Storage,
    device: Device,
}

#[derive(Debug)]
enum Storage {
    Flex(FlexTensor),
    Host(Vec<f32>),
}

impl ParameterStore {
    pub(crate) fn new(values: Vec<f32>, device: &Device) -> Self {
        let device = device.clone().inner();
        let storage = match flat_tensor(values.clone(), &device).try_into_primitive::<Flex>() {
            Ok(primitive) => Storage::Flex(primitive),
            Err(_) => Storage::Host(values),
        };
        Self { storage, device }
    }

    pub(crate) fn as_slice(&self) -> &[f32] {
        match &self.storage {
            Storage::Flex(tensor) => tensor.storage::<f32>(),
            Storage::Host(values) => values,
        }
    }

    /// Writable parameters. Copies them first if a replica still holds a view.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [f32] {
        match &mut self.storage {
            Storage::Flex(tensor) => tensor.storage_mut::<f32>(),
            Storage::Host(values) => values,
        }
    }

    /// `skeleton` with its trainable tensors replaced by views of this storage and its buffers by `buffers`.
    pub(crate) fn fill<M: Module>(
        &self,
        layout: &ParameterLayout,
        skeleton: M,
        buffers: &[f32],
    ) -> M {
        let flat = match &self.storage {
            Storage::Flex(tensor) => Tensor::from_primitive::<Flex>(tensor.clone()),
            Storage::Host(values) => flat_tensor(values.clone(), &self.device),
        };
        let buffers = (!buffers.is_empty()).then(|| flat_tensor(buffers.to_vec(), &self.device));
        skeleton.map(&mut Filler {
            layout,
            flat,
            buffers,
        })
    }
}

fn flat_tensor(values: Vec<f32>, device: &Device) -> Tensor<1> {
    let len = values.len();
    Tensor::from_data(TensorData::new(values, [len]), device)
}

struct Filler<'a> {
    layout: &'a ParameterLayout,
    flat: Tensor<1>,
    buffers: Option<Tensor<1>>,
}

impl ModuleMapper for Filler<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some((place, slot)) = self.layout.slot_of(param.id) else {
            return param;
        };
        let source = match place {
            Place::Trainable => &self.flat,
            Place::Buffer => match &self.buffers {
                Some(buffers) => buffers,
                None => return param,
            },
        };
        let shape: [usize; D] = std::array::from_fn(|d| slot.shape[d]);
        let value = source.clone().slice([slot.range()]).reshape(shape);
        let (id, _, mapper) = param.consume();
        Param::from_mapped_value(id, value, mapper)
    }
}

/// `module` without tracking and with its tensors replaced by empty ones, so that it holds no storage.
pub(crate) fn skeleton<M: Module>(module: &M, layout: &ParameterLayout) -> M {
    struct Empty<'a> {
        layout: &'a ParameterLayout,
        seen: BTreeSet<ParamId>,
    }
    impl ModuleMapper for Empty<'_> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            if self.layout.slot_of(param.id).is_none() {
                return param;
            }
            self.seen.insert(param.id);
            let (id, value, mapper) = param.consume();
            Param::from_mapped_value(id, Tensor::zeros([0; D], &value.device()), mapper)
        }
    }
    module.valid().map(&mut Empty {
        layout,
        seen: BTreeSet::new(),
    })
}
