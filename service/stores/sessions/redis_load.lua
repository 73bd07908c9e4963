#!lua flags=no-writes
local head = read_head()
if not head then return {'not_found'} end
return with_tail(head, 'ok')
