//! hp-planner.
