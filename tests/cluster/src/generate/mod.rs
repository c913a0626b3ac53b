//! Programs for the hosts to run, generated: what real ones are made of, at known sizes.
