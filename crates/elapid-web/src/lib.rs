//! A thin skin over the engine.
