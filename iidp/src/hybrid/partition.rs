//! Which part of a model a rank holds.

use std::collections::BTreeMap;
use std::ops::Range;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Device, Tensor, TensorData};

use super::workload::BlockModel;
use crate::bucket::HostSlice;
use crate::communicator::shard_range;
use crate::executor::mix;
use crate::pipeline::{Sequential, StageModule};
use crate::seeding::with_seed;
use crate::{Coordinates, Error, ParallelDims, ShardSpec};

/// Where a parameter or buffer of a rank comes from.
#[derive(Debug, Clone)]
pub(super) struct Placement {
    /// Canonical name.
    pub(super) name: String,
    /// Shape of the whole tensor.
    pub(super) shape: Vec<usize>,
    pub(super) spec: ShardSpec,
    pub(super) id: ParamId,
}

/// The blocks of a rank: chunks of blocks, whose weights are the rank's shards.
#[derive(Debug)]
pub(super) struct RankModel<B: StageModule> {
    /// Untracked.
    pub(super) model: Sequential<Sequential<B>>,
    pub(super) placements: Vec<Placement>,
}

/// The blocks of each position of the pipeline; position `c p + s` is chunk `c` of stage `s`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cuts(Vec<Range<usize>>);

impl Cuts {
    /// Even cuts, or those given: the first block of each position but the first.
    pub(super) fn new(
        blocks: usize,
        stages: usize,
        chunks: usize,
        given: Option<&[usize]>,
    ) -> Result<Self, Error> {
        let positions = stages * chunks;
        if positions > blocks {
            return Err(Error::Indivisible {
                dimension: "number of blocks".to_owned(),
                size: blocks,
                parts_name: "pp x chunks",
                parts: positions,
                nearest_parts: blocks,
                nearest_size: positions,
            });
        }
        let Some(given) = given else {
            return Ok(Self(
                (0..positions)
                    .map(|position| shard_range(blocks, positions, position))
                    .collect(),
            ));
        };
        let mut bounds = vec![0];
        bounds.extend_from_slice(given);
        bounds.push(blocks);
        let increasing = bounds.windows(2).all(|pair| pair[0] < pair[1]);
        if given.len() + 1 != positions || !increasing {
            return Err(Error::Invalid {
                what: "stage cuts",
                problem: format!(
                    "{given:?}, expected {} increasing numbers of blocks in 1..{blocks}",
                    positions - 1
                ),
            });
        }
        Ok(Self(
            bounds.windows(2).map(|pair| pair[0]..pair[1]).collect(),
        ))
    }

    pub(super) fn blocks(&self, position: usize) -> Range<usize> {
        self.0[position].clone()
    }

    /// The position that holds a block.
    pub(super) fn position_of(&self, block: usize) -> Option<usize> {
        self.0.iter().position(|blocks| blocks.contains(&block))
    }
}

/// A whole block without tracking, and its parameters.
struct WholeBlock<B> {
    block: B,
    parameters: Vec<Listed>,
}

/// A float tensor of a block.
struct Listed {
    path: String,
    shape: Vec<usize>,
    id: ParamId,
}

fn make_block<M: BlockModel>(
    model: &M,
    index: usize,
    seed: u64,
    device: &Device,
) -> Result<WholeBlock<M::Block>, Error> {
    let device = device.clone().autodiff();
    with_seed(&device, mix(seed ^ mix(index as u64)), || {
        let block = model
            .init_block(index, &device)
            .map_err(|error| Error::ModelInit {
                message: format!("block {index}: {error}"),
            })?;
        // Listing looks at all weights, which draws them.
        let mut lister = Lister::default();
        block.visit(&mut lister);
        Ok(WholeBlock {
            block: block.valid(),
            parameters: lister.listed,
        })
    })
}

impl<B: StageModule> RankModel<B> {
    /// Makes the blocks of the rank at `at`, and cuts them.
    pub(super) fn make<M: BlockModel<Block = B>>(
        model: &M,
        cuts: &Cuts,
        dims: ParallelDims,
        chunks: usize,
        at: Coordinates,
        seed: u64,
        device: &Device,
    ) -> Result<Self, Error> {
        let ties = model.ties();
        let mut placements: Vec<Placement> = Vec::new();
        let mut made = Vec::new();
        for chunk in 0..chunks {
            let mut blocks = Vec::new();
            for index in cuts.blocks(chunk * dims.pp + at.pp) {
                let WholeBlock { block, parameters } = make_block(model, index, seed, device)?;
                let mut specs: BTreeMap<_, _> = block.shard_specs().into_iter().collect();
                let mut block = shard_module(block, dims.tp, at.tp)?;
                let first = placements.len();
                placements.extend(parameters.into_iter().map(|listed| Placement {
                    name: canonical_name(index, &listed.path),
                    spec: specs.remove(&listed.path).unwrap_or_default(),
                    shape: listed.shape,
                    id: listed.id,
                }));
                for tie in ties.iter().filter(|tie| tie.alias_block == index) {
                    let owner_name = canonical_name(tie.owner_block, &tie.owner_path);
                    let here = placements[..first].iter().find(|p| p.name == owner_name);
                    let id = here.map(|owner| owner.id);
                    let value = tied_value(model, tie, dims.tp, at.tp, seed, device)?;
                    let mut setter = Setter {
                        path: Path::default(),
                        target: &tie.alias_path,
                        value: Some(value),
                        id,
                        error: None,
                    };
                    block = block.map(&mut setter);
                    if let Some(error) = setter.error {
                        return Err(error);
                    }
                    if setter.value.is_some() {
                        return Err(no_such(tie.alias_block, &tie.alias_path));
                    }
                    let alias_name = canonical_name(index, &tie.alias_path);
                    if id.is_some() {
                        // One tensor on this rank: the owner's.
                        placements.retain(|p| p.name != alias_name);
                    }
                }
                blocks.push(block);
            }
            made.push(Sequential::new(blocks));
        }
        Ok(Self {
            model: Sequential::new(made),
            placements,
        })
    }
}

/// The rank's shard of a tied parameter's initial value.
fn tied_value<M: BlockModel>(
    model: &M,
    tie: &super::Tie,
    tp: usize,
    rank: usize,
    seed: u64,
    device: &Device,
) -> Result<(Vec<f32>, Vec<usize>), Error> {
    let WholeBlock { block, .. } = make_block(model, tie.owner_block, seed, device)?;
    let block = shard_module(block, tp, rank)?;
    let mut finder = Finder {
        path: Path::default(),
        target: &tie.owner_path,
        found: None,
    };
    block.visit(&mut finder);
    finder
        .found
        .ok_or_else(|| no_such(tie.owner_block, &tie.owner_path))
}

fn no_such(block: usize, path: &str) -> Error {
    Error::Invalid {
        what: "tied parameter",
        problem: format!("block {block} has no parameter {path}"),
    }
}

pub(super) fn canonical_name(block: usize, path: &str) -> String {
    format!("blocks.{block}.{path}")
}

/// The block in a [`canonical_name`].
pub(super) fn block_of(name: &str) -> Option<usize> {
    name.strip_prefix("blocks.")?
        .split('.')
        .next()?
        .parse()
        .ok()
}

/// All blocks of a model as one module on `device`, with the weights that a run with this seed starts from; tied parameters are one tensor.
///
/// # Errors
///
/// [`Error::ModelInit`] if a block cannot be made, [`Error::Invalid`] for a tie to a parameter that does not exist, errors of [`BlockModel::check`].
pub fn init_whole<M: BlockModel>(
    model: &M,
    device: &Device,
    seed: u64,
) -> Result<Sequential<M::Block>, Error> {
    let dims = ParallelDims::new(1, 1, 1);
    model.check(dims)?;
    let cuts = Cuts::new(model.blocks(), 1, 1, None)?;
    let at = Coordinates {
        dp: 0,
        pp: 0,
        tp: 0,
    };
    let plain = device.clone().inner();
    let whole = RankModel::make(model, &cuts, dims, 1, at, seed, &plain)?;
    let chunk = whole.model.blocks()[0].clone();
    Ok(if device.is_autodiff() {
        chunk.train()
    } else {
        chunk
    })
}

/// `module` with every parameter replaced by the part that rank `rank` of `tp` holds, by its
/// [`shard_specs`](StageModule::shard_specs).
///
/// # Errors
///
/// [`Error::Indivisible`] and [`Error::Invalid`] for a tensor that cannot be cut so; the message names it.
pub fn shard_module<M: StageModule>(module: M, tp: usize, rank: usize) -> Result<M, Error> {
    if tp == 1 {
        return Ok(module);
    }
    let mut cutter = Cutter {
        specs: module.shard_specs().into_iter().collect(),
        path: Path::default(),
        tp,
        rank,
        error: None,
    };
    let module = module.map(&mut cutter);
    cutter.error.map_or(Ok(module), Err)
}

/// The path of fields and indices to where a visit is. Variants of enums do not count.
#[derive(Debug, Default)]
struct Path(Vec<String>);

impl Path {
    fn enter(&mut self, name: &str, container: &str) {
        if !container.starts_with("Enum:") {
            self.0.push(name.to_owned());
        }
    }

    fn exit(&mut self, container: &str) {
        if !container.starts_with("Enum:") {
            self.0.pop();
        }
    }

    fn join(&self) -> String {
        self.0.join(".")
    }
}

#[derive(Default)]
struct Lister {
    path: Path,
    listed: Vec<Listed>,
}

impl ModuleVisitor for Lister {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }

    fn exit_module(&mut self, _: &str, container: &str) {
        self.path.exit(container);
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.listed.push(Listed {
            path: self.path.join(),
            shape: param.base().dims().to_vec(),
            id: param.id,
        });
    }
}

struct Finder<'a> {
    path: Path,
    target: &'a str,
    found: Option<(Vec<f32>, Vec<usize>)>,
}

impl ModuleVisitor for Finder<'_> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }

    fn exit_module(&mut self, _: &str, container: &str) {
        self.path.exit(container);
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.path.join() == self.target {
            self.found = Some((values(param.base()), param.base().dims().to_vec()));
        }
    }
}

struct Cutter {
    specs: BTreeMap<String, ShardSpec>,
    path: Path,
    tp: usize,
    rank: usize,
    error: Option<Error>,
}

impl ModuleMapper for Cutter {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }

    fn exit_module(&mut self, _: &str, container: &str) {
        self.path.exit(container);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.path.join();
        let Some(spec) = self.specs.get(&path).filter(|spec| spec.dim().is_some()) else {
            return param;
        };
        let value = param.base();
        let shape = value.dims();
        let cut = spec.local_shape(&shape, self.tp).and_then(|local| {
            spec.cut(&values(value), &shape, self.tp, self.rank)
                .map(|values| (values, local))
        });
        match cut {
            Ok((values, local)) => replaced(param, values, &local, None),
            Err(error) => {
                self.error.get_or_insert(named(error, &path));
                param
            }
        }
    }
}

/// An error about a tensor with the tensor's name.
fn named(error: Error, path: &str) -> Error {
    match error {
        Error::Indivisible {
            dimension,
            size,
            parts_name,
            parts,
            nearest_parts,
            nearest_size,
        } => Error::Indivisible {
            dimension: format!("{dimension} of {path}"),
            size,
            parts_name,
            parts,
            nearest_parts,
            nearest_size,
        },
        Error::Invalid { what, problem } => Error::Invalid {
            what,
            problem: format!("{path}: {problem}"),
        },
        other => other,
    }
}

struct Setter<'a> {
    path: Path,
    target: &'a str,
    value: Option<(Vec<f32>, Vec<usize>)>,
    /// The identity that the parameter takes.
    id: Option<ParamId>,
    error: Option<Error>,
}

impl ModuleMapper for Setter<'_> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }

    fn exit_module(&mut self, _: &str, container: &str) {
        self.path.exit(container);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.path.join() != self.target {
            return param;
        }
        let Some((values, shape)) = self.value.take() else {
            return param;
        };
        if param.base().dims().as_slice() != shape.as_slice() {
            self.error = Some(Error::Invalid {
                what: "tied parameter",
                problem: format!(
                    "shape {:?} of {} differs from {shape:?} of what it is tied to",
                    param.base().dims(),
                    self.target
                ),
            });
            return param;
        }
        replaced(param, values, &shape, self.id)
    }
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    let plain = if tensor.is_autodiff() {
        tensor.inner()
    } else {
        tensor
    };
    HostSlice::of(plain).as_slice().to_vec()
}

/// The parameter with another value, whose shape has as many dimensions.
fn replaced<const D: usize>(
    param: Param<Tensor<D>>,
    values: Vec<f32>,
    shape: &[usize],
    id: Option<ParamId>,
) -> Param<Tensor<D>> {
    let (own, before, mapper) = param.consume();
    let value = Tensor::<D>::from_data(TensorData::new(values, shape.to_vec()), &before.device());
    let value = if before.is_require_grad() {
        value.require_grad()
    } else {
        value
    };
    Param::from_mapped_value(id.unwrap_or(own), value, mapper)
}
