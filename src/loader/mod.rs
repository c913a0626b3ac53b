//! What programs load, from the shared file system to the view.
