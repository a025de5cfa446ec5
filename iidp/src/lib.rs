//! iidp.
