//! A thin skin over the engine for web pages. Nothing is here yet: the page comes after the GPU.
