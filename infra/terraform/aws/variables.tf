variable "region" {
  description = "Where bucket and machines are: traffic between them is then free."
  type        = string
  default     = "us-east-1"
}

variable "name" {
  description = "Beginning of the names of roles and groups; clusters/aws.yaml uses pretraining-head and pretraining-worker."
  type        = string
  default     = "pretraining"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,30}$", var.name))
    error_message = "A name has 2 to 31 small letters, digits and hyphens."
  }
}

variable "bucket" {
  description = "Of the store; names of buckets are unique in the world."
  type        = string

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", var.bucket))
    error_message = "A bucket has 3 to 63 small letters, digits and hyphens; dots break TLS."
  }
}

variable "prefix" {
  description = "Everything of the store lies below this prefix of the bucket."
  type        = string
  default     = "pretraining"
}

variable "dataset_buckets" {
  description = "Buckets with shards, which workers may read and nobody may change."
  type        = list(string)
  default     = []
}

variable "vpc_id" {
  description = "Of the machines; empty = the account's default one."
  type        = string
  default     = ""
}

variable "ssh_cidrs" {
  description = "From where `ray up` reaches the head by ssh; your own address, such as 198.51.100.7/32. Never 0.0.0.0/0."
  type        = list(string)
  default     = []

  validation {
    condition     = !contains(var.ssh_cidrs, "0.0.0.0/0") && !contains(var.ssh_cidrs, "::/0")
    error_message = "Ray's head must not be reachable by everybody; name your own addresses."
  }
}

variable "noncurrent_days" {
  description = "How long an overwritten or deleted object can still be brought back."
  type        = number
  default     = 14
}

variable "monthly_budget_usd" {
  description = "A mail goes to budget_emails at 80 % and 100 % of it; 0 = no budget. Needs the cost allocation tag `project`, see docs/deploy.md."
  type        = number
  default     = 0
}

variable "budget_emails" {
  description = "Who is told."
  type        = list(string)
  default     = []
}
