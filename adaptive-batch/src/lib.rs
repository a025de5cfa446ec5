//! adaptive-batch.
