//! Communication among the CUDA devices of a process: gradients are summed by NCCL, through Burn's device all-reduce.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use burn::tensor::distributed::{ReduceOperation, all_reduce};
use burn::tensor::{Device, Tensor, TensorData};

use super::{Collective, Communicator, LocalCommunicator};
use crate::error::Error;

/// A rank that owns one CUDA device of this process: a [`LocalCommunicator`] whose [`all_reduce_sum`](Communicator::all_reduce_sum) runs on the
/// devices.
///
/// The ranks first agree on the call and its length, as in every collective; a rank that is lost, late or elsewhere is found there. Only then do
/// the devices communicate. Once they do there is no time-out, since NCCL has none. Sums are taken in NCCL's order: all ranks get the same bits, but not
/// those of the other communicators.
pub struct DeviceCommunicator {
    ranks: LocalCommunicator,
    device: Device,
    /// Of all ranks.
    devices: Vec<Device>,
}

impl fmt::Debug for DeviceCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceCommunicator")
            .field("ranks", &self.ranks)
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

impl DeviceCommunicator {
    /// The communicators of one rank per device, in their order. No wait of a rank for another takes longer than `timeout`.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] when there are no devices, a device is named twice, or `timeout` is zero.
    pub fn group(devices: &[Device], timeout: Duration) -> Result<Vec<Self>, Error> {
        let devices: Vec<Device> = devices.iter().cloned().map(Device::inner).collect();
        for (rank, device) in devices.iter().enumerate() {
            if let Some(first) = devices[..rank].iter().position(|other| other == device) {
                return Err(Error::Invalid {
                    what: "devices of a communicator",
                    problem: format!(
                        "ranks {first} and {rank} have {device:?}, expected one device per rank"
                    ),
                });
            }
        }
        let group = LocalCommunicator::group(devices.len(), timeout)?;
        Ok(group
            .into_iter()
            .zip(&devices)
            .map(|(ranks, device)| Self {
                ranks,
                device: device.clone(),
                devices: devices.clone(),
            })
            .collect())
    }
}

impl Communicator for DeviceCommunicator {
    fn rank(&self) -> usize {
        self.ranks.rank()
    }

    fn size(&self) -> usize {
        self.ranks.size()
    }

    fn all_reduce_sum(&self, data: &mut [f32]) -> Result<(), Error> {
        self.ranks.agree(Collective::AllReduceSum, data.len())?;
        if data.is_empty() || self.size() == 1 {
            return Ok(());
        }
        let values = TensorData::new(data.to_vec(), [data.len()]);
        let tensor = Tensor::<1>::from_data(values, &self.device);
        let sum = all_reduce(tensor, ReduceOperation::Sum, self.devices.clone()).resolve();
        for (value, sum) in data.iter_mut().zip(sum.into_data().iter::<f32>()) {
            *value = sum;
        }
        Ok(())
    }

    fn all_reduce_sum_f64(&self, data: &mut [f64]) -> Result<(), Error> {
        self.ranks.all_reduce_sum_f64(data)
    }

    fn reduce_scatter_sum(&self, data: &mut [f32]) -> Result<Range<usize>, Error> {
        self.ranks.reduce_scatter_sum(data)
    }

    fn all_gather(&self, data: &mut [f32]) -> Result<(), Error> {
        self.ranks.all_gather(data)
    }

    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        self.ranks.all_gather_bytes(bytes)
    }

    fn broadcast(&self, data: &mut [f32], root: usize) -> Result<(), Error> {
        self.ranks.broadcast(data, root)
    }

    fn send(&self, to: usize, tag: u64, data: Vec<f32>) -> Result<(), Error> {
        self.ranks.send(to, tag, data)
    }

    fn recv(&self, from: usize, tag: u64) -> Result<Vec<f32>, Error> {
        self.ranks.recv(from, tag)
    }

    fn barrier(&self) -> Result<(), Error> {
        self.ranks.barrier()
    }

    fn split(&self, color: usize, key: usize) -> Result<Box<dyn Communicator>, Error> {
        let (ranks, members) = self.ranks.split_off(color, key)?;
        let devices = members
            .into_iter()
            .map(|rank| self.devices[rank].clone())
            .collect();
        Ok(Box::new(Self {
            ranks,
            device: self.device.clone(),
            devices,
        }))
    }

    fn abort(&self, reason: &str) -> Error {
        self.ranks.abort(reason)
    }
}
