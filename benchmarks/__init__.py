# Without this file an installed package of the same name would be found in place of this folder.
