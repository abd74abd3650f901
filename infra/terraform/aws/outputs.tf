output "store" {
  description = "For ORCHESTRATOR_STORE in clusters/aws.yaml."
  value       = "s3://${aws_s3_bucket.store.id}/${var.prefix}"
}

output "security_group" {
  description = "For SecurityGroupIds and NetworkInterfaces in clusters/aws.yaml."
  value       = aws_security_group.cluster.id
}

output "head_profile" {
  description = "For IamInstanceProfile of the head."
  value       = aws_iam_instance_profile.head.name
}

output "worker_profile" {
  description = "For IamInstanceProfile of the workers."
  value       = aws_iam_instance_profile.worker.name
}

output "worker_role_arn" {
  description = "For `aws eks create-pod-identity-association`."
  value       = aws_iam_role.worker.arn
}

output "placement_group" {
  description = "For Placement in clusters/aws.yaml."
  value       = aws_placement_group.gpus.name
}
