//! A model's state under names that no layout owns.
//!
//! # Names and shapes
//!
//! | name in a file | type, shape | what |
//! |---|---|---|
//! | `blocks.0.qkv.weight` | `F32`, of the whole tensor | a parameter, a frozen weight or a running statistic, by its path in the whole model |
//! | `optimizer.moment_1.blocks.0.qkv.weight` | `F32`, the parameter's | a moment of the optimizer: `moment_1`, `moment_2` (Adam, `AdamW`, LAMB) or `velocity` (momentum SGD, LARS) |
//! | `optimizer.steps.blocks.0.qkv.weight` | `I64`, scalar | updates of the parameter |
//!
//! Shapes are Burn's: a linear layer's weight is `[inputs, outputs]`, the transpose of `PyTorch`'s; an embedding is `[vocabulary, width]`; a convolution `[output
//! channels, input channels / groups, height, width]`. Elements are in row-major order. A tied tensor is stored once. Whatever else a run has to remember (steps taken, position in the data, random state) fits in
//! [`StateDict::metadata`], as text.
//!
//! Files are in the `safetensors` format (<https://github.com/huggingface/safetensors>), which Python's package of this name reads:
//!
//! ```python
//! from safetensors.numpy import load_file
//! state = load_file("run.safetensors")
//! state["blocks.0.qkv.weight"].shape
//! ```

mod executor;
mod file;
mod hybrid;

use std::collections::BTreeMap;

use crate::communicator::Communicator;
use crate::error::Error;
use crate::reshard::{ModelSpec, RankState, ReshardPlan, StateLayout, TensorSpec};

/// What the names of the optimizer's state begin with.
const OPTIMIZER: &str = "optimizer.";

/// One whole tensor.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct StateTensor {
    /// Its shape; empty for a scalar.
    pub shape: Vec<usize>,
    /// Its elements in row-major order.
    pub values: Vec<f32>,
}

/// The state of a run, whole and by name: it can be saved under one layout and loaded under any other.
///
/// # Examples
///
/// ```
/// use iidp::reshard::{ModelSpec, RankState, TensorSpec};
/// use iidp::{ShardSpec, StateDict};
///
/// let tensors = vec![TensorSpec::new("up.weight", [2, 3], ShardSpec::split(1), 0)];
/// let model = ModelSpec::new(tensors, ["velocity"])?;
/// let state = RankState::new(vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0], vec![])
///     .with_moment("velocity", vec![0.5; 6])
///     .with_steps(vec![3]);
/// let mut dict = StateDict::from_whole(&model, &state)?;
/// dict.metadata.insert("epoch".into(), "2".into());
/// assert_eq!(dict.tensors["up.weight"].shape, [2, 3]);
///
/// let path = std::env::temp_dir().join(format!("iidp-doc-{}.safetensors", std::process::id()));
/// dict.save(&path)?;
/// let loaded = StateDict::load(&path)?;
/// assert_eq!(loaded, dict);
/// assert_eq!(loaded.to_whole(&model)?, state);
/// # std::fs::remove_file(path).unwrap();
/// # Ok::<(), iidp::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Default)]
pub struct StateDict {
    /// Parameters, frozen weights and running statistics, by name.
    pub tensors: BTreeMap<String, StateTensor>,
    /// The optimizer's moments: by the moment's name, then by the parameter's. Each is as large as its parameter.
    pub moments: BTreeMap<String, BTreeMap<String, Vec<f32>>>,
    /// Updates of each parameter, by name.
    pub steps: BTreeMap<String, u64>,
    /// Anything else, as text.
    pub metadata: BTreeMap<String, String>,
}

impl StateDict {
    /// The state of one rank that holds the whole model, as under [`StateLayout::whole`]. O(elements).
    ///
    /// # Errors
    ///
    /// When the state is not of that layout; [`Error::StateTensor`] for a tensor whose name belongs to the optimizer's.
    pub fn from_whole(model: &ModelSpec, state: &RankState) -> Result<Self, Error> {
        state.check(&StateLayout::whole(&model.clone().into())?, 0)?;
        let mut dict = Self::default();
        for name in model.moments() {
            dict.moments.insert(name.clone(), BTreeMap::new());
        }
        let (mut trained, mut other) = (0, 0);
        let mut steps = state.steps.iter();
        for tensor in model.tensors() {
            if tensor.name.starts_with(OPTIMIZER) {
                return Err(mismatch(
                    &tensor.name,
                    "a name of a model's tensor that begins with `optimizer.`, expected any other"
                        .into(),
                ));
            }
            let (flat, offset) = if tensor.trainable {
                (&state.parameters, &mut trained)
            } else {
                (&state.buffers, &mut other)
            };
            let range = *offset..*offset + tensor.elements();
            *offset = range.end;
            let values = flat[range.clone()].to_vec();
            let shape = tensor.shape.clone();
            dict.tensors
                .insert(tensor.name.clone(), StateTensor { shape, values });
            if tensor.trainable {
                dict.steps
                    .insert(tensor.name.clone(), steps.next().copied().unwrap_or(0));
                for (moment, values) in &state.moments {
                    if let Some(by_name) = dict.moments.get_mut(moment) {
                        by_name.insert(tensor.name.clone(), values[range.clone()].to_vec());
                    }
                }
            }
        }
        Ok(dict)
    }

    /// The state of one rank that holds the whole model. O(elements).
    ///
    /// # Errors
    ///
    /// [`Error::StateTensor`], naming the tensor, when one is missing, has another shape, or belongs to no tensor of the model.
    pub fn to_whole(&self, model: &ModelSpec) -> Result<RankState, Error> {
        self.check_names(model)?;
        let mut state = RankState::default();
        let (mut parameters, mut buffers) = (Vec::new(), Vec::new());
        for tensor in model.tensors() {
            let values = self.whole_tensor(tensor)?;
            if tensor.trainable {
                parameters.extend_from_slice(values);
                let steps = self.steps.get(&tensor.name);
                let name = || format!("{OPTIMIZER}steps.{}", tensor.name);
                state
                    .steps
                    .push(*steps.ok_or_else(|| mismatch(&name(), "missing".into()))?);
            } else {
                buffers.extend_from_slice(values);
            }
        }
        for moment in model.moments() {
            let mut flat = Vec::with_capacity(parameters.len());
            for tensor in model.tensors().iter().filter(|tensor| tensor.trainable) {
                let name = || format!("{OPTIMIZER}{moment}.{}", tensor.name);
                let by_name = self.moments.get(moment);
                let values = by_name.and_then(|by_name| by_name.get(&tensor.name));
                let values = values.ok_or_else(|| mismatch(&name(), "missing".into()))?;
                check_elements(&name(), values, &tensor.shape)?;
                flat.extend_from_slice(values);
            }
            state = state.with_moment(moment.clone(), flat);
        }
        state.parameters = parameters.into();
        state.buffers = buffers.into();
        Ok(state)
    }

    fn whole_tensor(&self, tensor: &TensorSpec) -> Result<&[f32], Error> {
        let stored = self
            .tensors
            .get(&tensor.name)
            .ok_or_else(|| mismatch(&tensor.name, "missing".into()))?;
        if stored.shape != tensor.shape {
            let problem = format!("shape {:?}, expected {:?}", stored.shape, tensor.shape);
            return Err(mismatch(&tensor.name, problem));
        }
        check_elements(&tensor.name, &stored.values, &tensor.shape)?;
        Ok(&stored.values)
    }

    /// Refuses what is not part of the model.
    fn check_names(&self, model: &ModelSpec) -> Result<(), Error> {
        let tensors: BTreeMap<&str, &TensorSpec> = model
            .tensors()
            .iter()
            .map(|t| (t.name.as_str(), t))
            .collect();
        let known = |name: &str| tensors.contains_key(name);
        let trained = |name: &str| tensors.get(name).is_some_and(|tensor| tensor.trainable);
        let unknown = |name: &str| mismatch(name, "not part of the model".into());
        if let Some(name) = self.tensors.keys().find(|name| !known(name)) {
            return Err(unknown(name));
        }
        if let Some(name) = self.steps.keys().find(|name| !trained(name)) {
            return Err(unknown(&format!("{OPTIMIZER}steps.{name}")));
        }
        for (moment, by_name) in &self.moments {
            let expected = model.moments().contains(moment);
            if let Some(name) = by_name.keys().find(|name| !(expected && trained(name))) {
                return Err(unknown(&format!("{OPTIMIZER}{moment}.{name}")));
            }
        }
        Ok(())
    }

    /// Gathers the state of all ranks on rank 0, which gets it; the others get `None`. Every rank calls it.
    ///
    /// # Errors
    ///
    /// As [`ReshardPlan::apply`] and [`Self::from_whole`].
    pub fn gather(
        communicator: &dyn Communicator,
        layout: &StateLayout,
        state: &RankState,
    ) -> Result<Option<Self>, Error> {
        let model = layout.model();
        let plan = ReshardPlan::new(layout, &StateLayout::whole(model)?)?;
        let whole = plan.apply(communicator, state)?;
        (communicator.rank() == 0)
            .then(|| Self::from_whole(model, &whole))
            .transpose()
    }

    /// Hands out the state that rank 0 has to all ranks; the others give `None`. Every rank calls it.
    ///
    /// # Errors
    ///
    /// [`Error::ReshardRefused`] on every rank when rank 0 has no state or one of another model, otherwise as [`ReshardPlan::apply`].
    pub fn scatter(
        dict: Option<&Self>,
        communicator: &dyn Communicator,
        layout: &StateLayout,
    ) -> Result<RankState, Error> {
        let model = layout.model();
        let plan = ReshardPlan::new(&StateLayout::whole(model)?, layout)?;
        if communicator.rank() > 0 {
            return plan.apply(communicator, &RankState::default());
        }
        match dict.map(|dict| dict.to_whole(model)) {
            Some(Ok(whole)) => plan.apply(communicator, &whole),
            // An empty state is refused by all ranks together; this one knows why.
            Some(Err(error)) => plan
                .apply(communicator, &RankState::default())
                .and(Err(error.clone()))
                .map_err(|refusal| match refusal {
                    Error::ReshardRefused { .. } => error,
                    other => other,
                }),
            None => plan.apply(communicator, &RankState::default()),
        }
    }

    /// The state of ranks that one process holds together.
    ///
    /// # Errors
    ///
    /// As [`ReshardPlan::apply_in_process`] and [`Self::from_whole`].
    pub fn from_ranks(layout: &StateLayout, states: &[RankState]) -> Result<Self, Error> {
        let model = layout.model();
        let plan = ReshardPlan::new(layout, &StateLayout::whole(model)?)?;
        let whole = plan.apply_in_process(states)?;
        let nothing = RankState::default();
        Self::from_whole(model, whole.first().unwrap_or(&nothing))
    }

    /// The states of all ranks of a layout, where one process holds them together.
    ///
    /// # Errors
    ///
    /// As [`Self::to_whole`].
    pub fn to_ranks(&self, layout: &StateLayout) -> Result<Vec<RankState>, Error> {
        let model = layout.model();
        let plan = ReshardPlan::new(&StateLayout::whole(model)?, layout)?;
        let mut states = plan.apply_in_process(&[self.to_whole(model)?])?;
        states.truncate(layout.ranks().len());
        Ok(states)
    }
}

fn check_elements(name: &str, values: &[f32], shape: &[usize]) -> Result<(), Error> {
    let expected: usize = shape.iter().product();
    if values.len() == expected {
        return Ok(());
    }
    let problem = format!(
        "{} elements, expected {expected} for shape {shape:?}",
        values.len()
    );
    Err(mismatch(name, problem))
}

fn mismatch(tensor: &str, problem: String) -> Error {
    Error::StateTensor {
        tensor: tensor.to_owned(),
        problem,
    }
}
